"""Pipelines on several processes: communication between ranks, and jobs that end cleanly.

Start with `transport.py`, the interface of communication, and `rank_mailbox.py`, the messages of the stages of a rank.

- `recent_maximum.py` shares numbers between processes without waiting.
- `process_transport.py` implements the interface with torch.distributed: `process_groups.py` opens and interrupts
  connections, `host_channels.py` sends messages with gloo, `device_channels.py` with NCCL. With gloo, each channel has
  an I/O thread (`io_thread.py`), each message a header (`host_message.py`) and memory that is used again
  (`message_buffers.py`), and freed memory stays with the process (`malloc.py`).
- `thread_transport.py` implements it for ranks that are threads of one process.
- `job.py` connects the processes of a job, `watchdog.py` ends the job if one of them dies or hangs, and `launch.py`
  starts them on one machine. `parent_death.py` continues a stopped process when the launcher is killed.
- `resilient.py` continues a job that has lost a process: `launch.py` replaces it and begins a new generation
  (`membership.py`), which continues from snapshots in memory (`snapshots.py`, `packed_state.py`, `state_exchange.py`).
"""

from petra.distributed.job import JobFailed, ReportedElsewhere, join
from petra.distributed.launch import Recovery, launch_ranks
from petra.distributed.process_groups import LostRank
from petra.distributed.process_transport import ProcessTransport
from petra.distributed.rank_mailbox import RankMailbox
from petra.distributed.recent_maximum import RecentMaximum
from petra.distributed.resilient import run_in_job
from petra.distributed.snapshots import Snapshot, Snapshots
from petra.distributed.thread_transport import run_together
from petra.distributed.transport import RankPosition, SingleProcess, Transport

__all__ = [
    "JobFailed",
    "LostRank",
    "ProcessTransport",
    "RankMailbox",
    "RankPosition",
    "RecentMaximum",
    "Recovery",
    "ReportedElsewhere",
    "SingleProcess",
    "Snapshot",
    "Snapshots",
    "Transport",
    "join",
    "launch_ranks",
    "run_in_job",
    "run_together",
]
