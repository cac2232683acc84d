//! Inputs and outputs of the state machines.

mod coordinator;
mod peer;
mod task;

pub use self::coordinator::{
    AuditOutcome, CoordinatorAction, CoordinatorEvent, CoordinatorInput, LossCause, MoveObstacle,
    StepCounts,
};
pub use self::peer::{Fault, PeerAction, PeerEvent, PeerInput, PeerLoad};
pub use self::task::{DeviceIndex, Owned, Payload, PayloadId, Task, TaskResult};
