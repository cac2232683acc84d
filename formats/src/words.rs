//! Numbers and peers in texts for people.

use shoal_protocol::ids::PeerId;
use shoal_protocol::plain_name::PeerName;

/// `1 peer`, `2 peers`, `2 microbatches`.
#[must_use]
pub fn counted(count: u64, thing: &str) -> String {
    let plural = match count {
        1 => "",
        _ if thing.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{count} {thing}{plural}")
}

/// Three digits or so, with `k`, `M` or `G`.
#[must_use]
pub fn with_prefix(value: f64) -> String {
    match value {
        value if value >= 1e9 => format!("{:.2}G", value / 1e9),
        value if value >= 1e6 => format!("{:.2}M", value / 1e6),
        value if value >= 1e4 => format!("{:.1}k", value / 1e3),
        value if value >= 1e3 => format!("{:.2}k", value / 1e3),
        value => format!("{value:.0}"),
    }
}

/// A peer for people: `gpu-7 (JrKP92)`, or the end of its identifier alone.
#[must_use]
pub fn title(peer: PeerId, name: Option<&PeerName>) -> String {
    let short = peer.short();
    name.map_or_else(|| short.clone(), |name| format!("{name} ({short})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_short() {
        assert_eq!(with_prefix(950.4), "950");
        assert_eq!(with_prefix(8_250.0), "8.25k");
        assert_eq!(with_prefix(82_500.0), "82.5k");
        assert_eq!(with_prefix(1_234_567.0), "1.23M");
        assert_eq!(with_prefix(2.05e9), "2.05G");
    }
}
