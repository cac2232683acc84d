//! The program `shoal`.
//!
//! Its exit codes are those of [`shoal_node::exit::Exit`], and 0 for success. Whatever goes wrong is
//! one line on stderr.

use std::process::ExitCode;

use shoal_node::cli::{self, Refusal};
use shoal_node::commands::version;
use shoal_node::exit::{Exit, one_line};
use shoal_node::{commands, logging};

fn main() -> ExitCode {
    logging::report_panics();
    if version::is_verbose(std::env::args_os().skip(1)) {
        print!("{}", version::verbose());
        return ExitCode::SUCCESS;
    }
    let cli = match cli::parse(std::env::args_os(), std::env::vars_os()) {
        Ok(cli) => cli,
        Err(Refusal::Arguments(refusal)) => refusal.exit(),
        Err(refusal) => {
            logging::report_failure(&one_line(&refusal.into()));
            return Exit::Usage.into();
        }
    };
    let outcome = logging::start(cli.log_format, cli.log.as_deref())
        .and_then(|()| commands::run(cli.command, cli.log_format));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            logging::report_failure(&one_line(&error));
            Exit::of(&error).into()
        }
    }
}
