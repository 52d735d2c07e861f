"""The mathematics of the algorithms: pure functions on torch tensors. Knows no plug-in, options or backend."""

from headrace_trainer.algorithms.functional import aggregation, correction, kl, shaping, tensors
from headrace_trainer.algorithms.functional.advantages import groups, returns
from headrace_trainer.algorithms.functional.advantages.groups import *  # noqa: F403
from headrace_trainer.algorithms.functional.advantages.returns import *  # noqa: F403
from headrace_trainer.algorithms.functional.aggregation import *  # noqa: F403
from headrace_trainer.algorithms.functional.correction import *  # noqa: F403
from headrace_trainer.algorithms.functional.kl import *  # noqa: F403
from headrace_trainer.algorithms.functional.losses import covariance, distillation, policy, sequence, value
from headrace_trainer.algorithms.functional.losses.covariance import *  # noqa: F403
from headrace_trainer.algorithms.functional.losses.distillation import *  # noqa: F403
from headrace_trainer.algorithms.functional.losses.policy import *  # noqa: F403
from headrace_trainer.algorithms.functional.losses.sequence import *  # noqa: F403
from headrace_trainer.algorithms.functional.losses.value import *  # noqa: F403
from headrace_trainer.algorithms.functional.shaping import *  # noqa: F403
from headrace_trainer.algorithms.functional.tensors import *  # noqa: F403

# Each module says which of its names algorithms of others take from here.
__all__ = []
__all__ += groups.__all__
__all__ += returns.__all__
__all__ += aggregation.__all__
__all__ += correction.__all__
__all__ += kl.__all__
__all__ += covariance.__all__
__all__ += distillation.__all__
__all__ += policy.__all__
__all__ += sequence.__all__
__all__ += value.__all__
__all__ += shaping.__all__
__all__ += tensors.__all__
