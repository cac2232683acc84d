//! Lengths of time as people type them.

use std::time::Duration;

/// The units, with their seconds.
const UNITS: [(&str, f64); 5] = [("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0), ("", 1.0)];

/// The longest length of time.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// The shortest that can be waited for.
const SHORTEST: Duration = Duration::from_millis(100);

/// Reads a length of time, as `90s`, `1.5min` or `500ms`; a number alone is in seconds.
///
/// # Errors
/// If it is none, or not from 100 ms to a day.
pub(super) fn parse_duration(text: &str) -> Result<Duration, &'static str> {
    const FORMS: &str = "a time is a number with ms, s, min or h, as 30s, from 100ms to 24h";
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = UNITS.iter().find(|(name, _)| *name == unit.trim()).ok_or(FORMS)?;
    let seconds = number.parse::<f64>().map_err(|_| FORMS)? * unit.1;
    let duration = Duration::try_from_secs_f64(seconds).map_err(|_| FORMS)?;
    (SHORTEST..=LONGEST).contains(&duration).then_some(duration).ok_or(FORMS)
}

/// The same, or `none`, which is zero.
///
/// # Errors
/// As of [`parse_duration`].
pub(super) fn parse_duration_or_none(text: &str) -> Result<Duration, String> {
    if matches!(text, "none" | "0" | "0s") {
        return Ok(Duration::ZERO);
    }
    parse_duration(text).map_err(|forms| format!("{forms}, or `none`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        let times = [("30s", 30_000), ("1.5min", 90_000), ("500ms", 500), ("1h", 3_600_000)];
        for (text, milliseconds) in times.into_iter().chain([("25", 25_000), ("0.1", 100)]) {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for text in ["", "s", "1d", "-1s", "1e9", "50ms", "25h", "1..2s", "none", "0", "1 min 2"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        for text in ["none", "0", "0s"] {
            assert_eq!(parse_duration_or_none(text), Ok(Duration::ZERO), "{text}");
        }
        let refused = parse_duration_or_none("never").expect_err("it is no time");
        assert!(refused.ends_with("or `none`"), "{refused}");
    }
}
