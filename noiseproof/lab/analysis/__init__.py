"""Why a run is robust: curvature, features, loss surface, theory."""
