//! No tier overflows, and what a task reads is on the device and is the present state of its stage.

use shoal_protocol::units::Moment;

use crate::sim::tiers::{Read, Tiers};

/// Checks a device after a task.
pub(in crate::sim) fn check(now: Moment, tiers: &Tiers) -> Result<(), String> {
    let (held, memory) = (tiers.held(now), tiers.memory());
    if held > memory {
        return Err(format!("the device holds {held} and has {memory}"));
    }
    for Read { place, found, present } in &tiers.reads {
        match found {
            None => return Err(format!("{place:?} is read and is not on the device")),
            Some(found) if found != present => {
                return Err(format!("{place:?} is read as {found:?} and is {present:?}"));
            }
            Some(_) => {}
        }
    }
    Ok(())
}
