"""The coordinator's resources under the client's names. They are read with `from_json`, which is lenient."""

from headrace_schema.evaluations import ComparisonView as Comparison
from headrace_schema.evaluations import EvaluationRunView as EvaluationRun
from headrace_schema.evaluations import VideoView as Video
from headrace_schema.views import CertificateView as Certificate
from headrace_schema.views import CheckpointView as Checkpoint
from headrace_schema.views import CountsView as Counts
from headrace_schema.views import DeviceView as Device
from headrace_schema.views import EvaluationView as Evaluation
from headrace_schema.views import EventView as Event
from headrace_schema.views import InstanceView as Instance
from headrace_schema.views import LeaseListView as Leases
from headrace_schema.views import LeaseView as Lease
from headrace_schema.views import PolicyView as Policy
from headrace_schema.views import RunView as Run
from headrace_schema.views import StepView as Step
from headrace_schema.views import TrajectoryView as Trajectory

__all__ = [
    "Certificate",
    "Checkpoint",
    "Comparison",
    "Counts",
    "Device",
    "Evaluation",
    "EvaluationRun",
    "Event",
    "Instance",
    "Lease",
    "Leases",
    "Policy",
    "Run",
    "Step",
    "Trajectory",
    "Video",
]
