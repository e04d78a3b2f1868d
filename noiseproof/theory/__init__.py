"""The paper's propositions and theorems as functions of features, or of a model and data.

Compact and separated classes  margin_guarantee, dispersion_guarantee, separation_guarantee,
                               class_radius
Momentum and the margin        margin_gradients
Scaling without learning       scale_features, scaling_report
Invisible to softmax           null_space, invisible_variance
Curvature and stability        bound_curvature; upper_bound, sharper_upper_bound, lower_bound
Generalisation of the sphere   sphere_bound, leaving_limits
Classes at earlier stages      divergence_bound, estimate_divergence
Exact confidence limits        upper_limit, lower_limit

Each returns a number or a small named tuple, and its docstring states what it assumes. Use features
of unaugmented data, in eval mode.
"""

from noiseproof.theory.binomial import lower_limit, upper_limit
from noiseproof.theory.curvature_bounds import (
    CurvatureBounds,
    bound_curvature,
    lower_bound,
    sharper_upper_bound,
    upper_bound,
)
from noiseproof.theory.divergence import (
    DivergenceBound,
    DivergenceEstimate,
    divergence_bound,
    estimate_divergence,
    pinsker_bound,
    sharper_bound,
)
from noiseproof.theory.generalisation import (
    LeavingLimits,
    SphereBound,
    leaving_limits,
    margin_loss,
    sphere_bound,
)
from noiseproof.theory.gradient import MarginGradients, margin_gradients
from noiseproof.theory.guarantees import (
    Guarantee,
    Separation,
    class_radius,
    dispersion_guarantee,
    margin_guarantee,
    separation_guarantee,
)
from noiseproof.theory.scaling import Scaled, ScalingReport, scale_features, scaling_report
from noiseproof.theory.softmax_null import (
    InvisibleVariance,
    SoftmaxNull,
    invisible_variance,
    null_space,
)

__all__ = [
    "CurvatureBounds", "DivergenceBound", "DivergenceEstimate", "Guarantee", "InvisibleVariance",
    "LeavingLimits", "MarginGradients", "Scaled", "ScalingReport", "Separation", "SoftmaxNull",
    "SphereBound", "bound_curvature", "class_radius", "dispersion_guarantee", "divergence_bound",
    "estimate_divergence", "invisible_variance", "leaving_limits", "lower_bound", "lower_limit",
    "margin_gradients", "margin_guarantee", "margin_loss", "null_space", "pinsker_bound",
    "scale_features", "scaling_report", "separation_guarantee", "sharper_bound",
    "sharper_upper_bound", "sphere_bound", "upper_bound", "upper_limit",
]  # fmt: skip
