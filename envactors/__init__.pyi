# The public names. Type checkers read this file in place of `__init__.py`, which finds each name's module here.

from concurrent.futures import Future as Future
from concurrent.futures import as_completed as as_completed
from concurrent.futures import wait as wait

from envactors.actor.future import ActorFuture as ActorFuture
from envactors.actor.future import as_completed_async as as_completed_async
from envactors.actor.handle import ActorHandle as ActorHandle
from envactors.actor.pool import ActorPool as ActorPool
from envactors.actor.spawn import spawn as spawn
from envactors.actor.states import ActorState as ActorState
from envactors.actor.states import ActorStats as ActorStats
from envactors.backends.inline import InlineBackend as InlineBackend
from envactors.backends.process import ProcessBackend as ProcessBackend
from envactors.backends.thread import ThreadBackend as ThreadBackend
from envactors.errors import ActorClosedError as ActorClosedError
from envactors.errors import ActorDiedError as ActorDiedError
from envactors.errors import ActorError as ActorError
from envactors.errors import ActorStartError as ActorStartError
from envactors.errors import ActorTimeoutError as ActorTimeoutError
from envactors.errors import AlreadyPendingError as AlreadyPendingError
from envactors.errors import EnvActorsError as EnvActorsError
from envactors.errors import NodeLostError as NodeLostError
from envactors.errors import NothingPendingError as NothingPendingError
from envactors.errors import RemoteTraceback as RemoteTraceback
from envactors.errors import RestartsExhaustedError as RestartsExhaustedError
from envactors.errors import SerializationError as SerializationError
from envactors.errors import SpaceMismatchError as SpaceMismatchError
from envactors.errors import VectorEnvError as VectorEnvError
from envactors.errors import VectorInputError as VectorInputError
from envactors.errors import VectorStepError as VectorStepError
from envactors.errors import VectorTimeoutError as VectorTimeoutError
from envactors.mailbox.specs import ArraySpec as ArraySpec
from envactors.observe.trace import trace as trace
from envactors.options import Deadlines as Deadlines
from envactors.options import RecyclePolicy as RecyclePolicy
from envactors.options import RestartPolicy as RestartPolicy
from envactors.options import SnapshotPolicy as SnapshotPolicy
from envactors.remote.backend import RemoteBackend as RemoteBackend
from envactors.rollout.context import PolicyContext as PolicyContext
from envactors.rollout.results import Evaluation as Evaluation
from envactors.rollout.results import Rollout as Rollout
from envactors.sessions.outcomes import Completed as Completed
from envactors.sessions.outcomes import Failed as Failed
from envactors.sessions.pool import SessionPool as SessionPool
from envactors.sessions.statistics import SessionStats as SessionStats
from envactors.vector.options import VectorOptions as VectorOptions
from envactors.vector.results import Batch as Batch
from envactors.vector.results import EnvStep as EnvStep
from envactors.vector.statistics import VectorStats as VectorStats
from envactors.vector_env import VectorEnv as VectorEnv
from envactors.vector_env import make_vec as make_vec
from envactors.worker.context import ActorContext as ActorContext
from envactors.worker.context import current_actor as current_actor

__version__: str
