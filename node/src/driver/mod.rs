//! The driver: hands events to the scheduler's state machines and carries out their actions.
//!
//! One task runs the [event loop](event_loop) until the run is over. Each component around it owns
//! its state: the [engine](engine_host), the [links](peer_network), the peer's view of the
//! [coordination](coordination), its [checkpoints](checkpoint_shelf), the [end](shutdown) of the
//! process and the [reports](status_feed). A component returns [effects](effect) for the others and
//! changes no other's state. A peer sends messages to itself through the same inputs as to others,
//! so a run alone is a swarm of one.

mod admission;
mod anchor_role;
mod archive;
mod background_results;
mod checkpoint_collect;
mod checkpoint_shelf;
mod checkpoint_staging;
mod checkpoint_writer;
pub(crate) mod chunks;
mod context;
mod coordination;
mod coordinator_contact;
mod cost_meter;
mod earlier_curves;
mod effect;
mod engine_host;
mod engine_thread;
mod engine_waits;
mod event_loop;
mod incoming;
mod job_report;
mod latency_probe;
mod link_events;
mod liveness_probe;
mod metrics_update;
pub mod observer;
mod outgoing;
mod own_pause;
mod packer;
mod passes;
mod payload;
pub(crate) mod peer_names;
mod peer_network;
mod port_watch;
mod resource_budget;
pub(crate) mod resume;
mod run_files;
mod samples;
mod score_queue;
mod setup;
mod shutdown;
mod spill;
mod startup_probes;
mod status_feed;
mod status_snapshot;
mod step_progress;
mod streamed_shards;
mod swap_watch;
mod timers;
mod unpacker;
mod upload_queue;
mod wrong_work;

pub use self::archive::Archive;
pub(crate) use self::checkpoint_collect::{Scattered, collect};
pub(crate) use self::checkpoint_staging::Staging;
pub use self::event_loop::run;
pub use self::packer::PackingMode;
pub use self::resource_budget::ResourceLimits;
pub(crate) use self::run_files::{FileHolders, RunFiles};
pub use self::score_queue::ScoreCommand;
pub use self::setup::{AnchorStart, Leaving, Network, PeerDevices, RoleSetup, Setup};
pub use self::shutdown::Outcome;
