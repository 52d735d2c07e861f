"""The coordinator's resources under the client's names. They are read with `from_json`, which is lenient."""

from headrace_schema.resources.evaluations import ComparisonView as Comparison
from headrace_schema.resources.evaluations import EvaluationRunView as EvaluationRun
from headrace_schema.resources.evaluations import EvaluationView as Evaluation
from headrace_schema.resources.evaluations import VideoView as Video
from headrace_schema.resources.fleet import DeviceView as Device
from headrace_schema.resources.fleet import HealthView as Health
from headrace_schema.resources.fleet import InstanceView as Instance
from headrace_schema.resources.fleet import LeaseListView as Leases
from headrace_schema.resources.fleet import LeaseView as Lease
from headrace_schema.resources.views import CertificateView as Certificate
from headrace_schema.resources.views import CheckpointView as Checkpoint
from headrace_schema.resources.views import CountsView as Counts
from headrace_schema.resources.views import EventView as Event
from headrace_schema.resources.views import PolicyView as Policy
from headrace_schema.resources.views import RecordingListView as Recordings
from headrace_schema.resources.views import RecordingView as Recording
from headrace_schema.resources.views import RunView as Run
from headrace_schema.resources.views import StepView as Step
from headrace_schema.resources.views import TrajectoryView as Trajectory

__all__ = [
    "Certificate",
    "Checkpoint",
    "Comparison",
    "Counts",
    "Device",
    "Evaluation",
    "EvaluationRun",
    "Event",
    "Health",
    "Instance",
    "Lease",
    "Leases",
    "Policy",
    "Recording",
    "Recordings",
    "Run",
    "Step",
    "Trajectory",
    "Video",
]
