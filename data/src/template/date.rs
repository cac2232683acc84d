//! The date that a template sees as today.

use std::fmt;
use std::str::FromStr;

use minijinja::{Error, ErrorKind};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A day of the Gregorian calendar, at midnight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Date {
    year: u32,
    month: u32,
    day: u32,
}

/// The error of a text that is no date.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no date: write it as 2026-11-25")]
pub struct DateError(String);

impl FromStr for Date {
    type Err = DateError;

    fn from_str(text: &str) -> Result<Self, DateError> {
        let invalid = || DateError(text.to_owned());
        let numbers: Vec<u32> = text
            .split('-')
            .map(|part| part.parse().map_err(|_| invalid()))
            .collect::<Result<_, _>>()?;
        let [year, month, day] = numbers[..] else { return Err(invalid()) };
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let days = match month {
            2 => 28 + u32::from(leap),
            4 | 6 | 9 | 11 => 30,
            1..=12 => 31,
            _ => return Err(invalid()),
        };
        if !(1..=9999).contains(&year) || !(1..=days).contains(&day) {
            return Err(invalid());
        }
        Ok(Self { year, month, day })
    }
}

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}-{:02}", self.year, self.month, self.day)
    }
}

impl Date {
    /// The date in a format of C's `strftime`, with the names of the C locale.
    pub(super) fn format(self, format: &str) -> Result<String, Error> {
        let mut text = String::new();
        let mut characters = format.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                text.push(character);
                continue;
            }
            let code = characters.next();
            let part = code.and_then(|code| self.part(code)).ok_or_else(|| {
                let code = code.map_or_else(String::new, String::from);
                Error::new(ErrorKind::InvalidOperation, format!("%{code} is no part of a date"))
            })?;
            text.push_str(&part);
        }
        Ok(text)
    }

    fn part(self, code: char) -> Option<String> {
        let month = MONTHS[self.month as usize - 1];
        let week_day = DAYS[self.week_day()];
        Some(match code {
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'm' => format!("{:02}", self.month),
            'y' => format!("{:02}", self.year % 100),
            'Y' => self.year.to_string(),
            'b' | 'h' => month[..3].to_owned(),
            'B' => month.to_owned(),
            'a' => week_day[..3].to_owned(),
            'A' => week_day.to_owned(),
            'F' => self.to_string(),
            'D' => format!("{:02}/{:02}/{:02}", self.month, self.day, self.year % 100),
            'H' | 'M' | 'S' => "00".to_owned(),
            'I' => "12".to_owned(),
            'p' => "AM".to_owned(),
            'T' => "00:00:00".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }

    /// The day of the week, 0 for Sunday (Sakamoto, 1992).
    fn week_day(self) -> usize {
        const SHIFTS: [u32; 12] = [0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4];
        let year = if self.month < 3 { self.year - 1 } else { self.year };
        let days = year + year / 4 - year / 100 + year / 400;
        ((days + SHIFTS[self.month as usize - 1] + self.day) % 7) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_formatted_as_by_python() {
        let date: Date = "2024-07-06".parse().expect("a date");
        let text = date.format("%d %b %Y|%A, %e %B|%y%m|%a %F %%").expect("known codes");
        assert_eq!(text, "06 Jul 2024|Saturday,  6 July|2407|Sat 2024-07-06 %");
        assert!(date.format("%Q").is_err());
        assert!(date.format("%").is_err());
    }

    #[test]
    fn only_dates_are_parsed() {
        for text in ["2024-02-29", "2000-02-29", "1-1-1"] {
            assert!(text.parse::<Date>().is_ok(), "{text}");
        }
        for text in ["", "2023-02-29", "1900-02-29", "2024-13-01", "2024-1", "2024-1-0", "a-b-c"] {
            assert!(text.parse::<Date>().is_err(), "{text}");
        }
    }
}
