//! What goes into the state machines and what comes out of them.

mod coordinator;
mod peer;
mod task;

pub use self::coordinator::{
    CoordinatorAction, CoordinatorEvent, CoordinatorInput, MoveObstacle, StepBooks,
};
pub use self::peer::{Fault, PeerAction, PeerEvent, PeerInput, PeerLoad};
pub use self::task::{Payload, PayloadId, Task, TaskResult};
