//! The section `[lora]` of `run.toml`.

use shoal_protocol::manifest::Lora;

/// The key of a packed base.
const NF4: &str = "base = \"nf4\"";

/// The section in TOML, or a comment with an example if there is none.
pub(crate) fn to_toml(lora: Option<&Lora>) -> String {
    let Some(Lora { rank, alpha, targets, base }) = lora else {
        return format!("# [lora]\n# rank = 16\n# alpha = 32.0\n# {NF4}");
    };
    let names: Vec<&str> = targets.iter().map(|target| target.matrix()).collect();
    let base = match base {
        Some(format) => format!("base = {:?}", format.name()),
        None => format!("# {NF4}"),
    };
    format!("[lora]\nrank = {rank}\nalpha = {alpha:?}\ntargets = {names:?}\n{base}")
}
