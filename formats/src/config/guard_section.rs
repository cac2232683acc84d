//! The section `[guard]` of `run.toml`.

use shoal_protocol::manifest::Guard;

/// The section in TOML, or a comment with the defaults if there is none.
pub(crate) fn to_toml(guard: Option<&Guard>) -> String {
    let Guard { deviations, window, least, rate, steps, not_finite, patience } =
        guard.copied().unwrap_or_default();
    let text = format!(
        "[guard]\n\
         deviations = {deviations:<17?} # above the median of the last steps\n\
         window = {window:<21} # steps\n\
         least = {least:<22} # steps before the first that is judged\n\
         rate = {rate:<23?} # of the learning rate; 0: the step is skipped\n\
         steps = {steps:<22} # more steps at that rate\n\
         not_finite = {not_finite:<17} # not with [outer]\n\
         patience = {patience:<19} # steps in a row"
    );
    match guard {
        Some(_) => text,
        None => text.lines().map(|line| format!("# {line}")).collect::<Vec<_>>().join("\n"),
    }
}
