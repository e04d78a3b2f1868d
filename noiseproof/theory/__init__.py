"""The paper's propositions and theorems as functions of features, or of a model and data.

Momentum and the margin        proposition 4.1        margin_gradients
Compact classes                proposition 5.1        dispersion_guarantee, class_radius
Separated classes              proposition 5.2        margin_guarantee, separation_guarantee
Scaling without learning       proposition 5.3        scale_features, scaling_report
Invisible to softmax           section 3.2            null_space, invisible_variance
Curvature and stability        theorem 6.1            bound_curvature; upper_bound, lower_bound,
                                                      sharper_upper_bound
Generalisation of the sphere   theorem 6.2            sphere_bound, leaving_limits, margin_loss
Classes at earlier stages      theorem 6.3            divergence_bound, estimate_divergence
Exact confidence limits                               upper_limit, lower_limit

Each returns a number or a small named tuple, and its docstring states what it assumes. A result
with `holds` also has a `verdict`, "vacuous", "holds" or "violated", because a statement that says
nothing about a case holds as well. Use features of unaugmented data, in eval mode.
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
from noiseproof.theory.verdict import Cases

__all__ = [
    "Cases", "CurvatureBounds", "DivergenceBound", "DivergenceEstimate", "Guarantee",
    "InvisibleVariance", "LeavingLimits", "MarginGradients", "Scaled", "ScalingReport",
    "Separation", "SoftmaxNull", "SphereBound", "bound_curvature", "class_radius",
    "dispersion_guarantee", "divergence_bound", "estimate_divergence", "invisible_variance",
    "leaving_limits", "lower_bound", "lower_limit", "margin_gradients", "margin_guarantee",
    "margin_loss", "null_space", "pinsker_bound", "scale_features", "scaling_report",
    "separation_guarantee", "sharper_bound", "sharper_upper_bound", "sphere_bound", "upper_bound",
    "upper_limit",
]  # fmt: skip
