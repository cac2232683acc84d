//! The commands of the `shoal` program.

mod audit;
mod bucket;
mod chat;
mod checkpoint;
mod chunk;
mod client;
mod completion;
mod contact;
mod data;
mod data_notes;
mod demo;
mod doctor;
mod fetch;
mod finetune;
mod founding;
mod generate;
mod healthcheck;
mod hub;
mod id;
mod init;
mod invite;
pub mod join;
pub mod local;
mod man;
mod model;
mod plan;
mod plot;
mod reference;
mod reshape;
mod run_work;
pub mod simulate;
pub mod start;
mod status;
mod stream;
mod timeline;
mod top;
mod training;
mod unfinished_run;
pub mod version;

use crate::cli::{Command, LogFormat};

/// Runs a command.
///
/// # Errors
/// If it fails. The error carries the exit code.
pub fn run(command: Command, log_format: LogFormat) -> anyhow::Result<()> {
    match command {
        Command::Demo(args) => demo::run(&args, log_format),
        Command::Init(args) => init::run(&args),
        Command::Finetune(args) => finetune::run(args),
        Command::Import(args) => model::import(&args),
        Command::Export(args) => model::export(&args),
        Command::Push(args) => model::push(&args),
        Command::Start(args) => start::run(args),
        Command::Join(args) => join::run(args),
        Command::Invite(command) => invite::run(&command),
        Command::Anchor(command) => invite::anchor(&command),
        Command::Audit(args) => audit::run(&args),
        Command::Ban(args) => invite::ban(&args),
        Command::Unban(args) => invite::unban(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Plot(args) => plot::run(&args),
        Command::Healthcheck(args) => healthcheck::run(&args),
        Command::Local(args) => local::run(args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Data(command) => data::run(command),
        Command::Checkpoint(command) => checkpoint::run(command),
        Command::Chunk(command) => chunk::run(command),
        Command::Generate(args) => generate::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Id(args) => id::run(&args),
        Command::Completion(args) => {
            completion::run(&args);
            Ok(())
        }
        Command::Man(args) => man::run(&args),
    }
}
