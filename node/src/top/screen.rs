//! The screen's state, and how keys change it.

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use crate::status::Status;

/// Events that a page scrolls by.
const PAGE: usize = 10;

/// The screen's state.
#[derive(Debug)]
pub(super) struct Screen {
    /// The newest status.
    pub(super) status: Status,
    /// Why the last request failed, if it did.
    pub(super) failure: Option<String>,
    /// Whether the help is open.
    pub(super) help: bool,
    /// How many of the newest events are scrolled past.
    pub(super) back: usize,
}

/// Whether the program continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    On,
    End,
}

impl Screen {
    pub(super) fn of(status: Status) -> Self {
        Self { status, failure: None, help: false, back: 0 }
    }

    /// Handles the peer's answer. After a failure the last status stays.
    pub(super) fn answer(&mut self, answer: Result<Status, String>) {
        match answer {
            Ok(status) => {
                self.status = status;
                self.failure = None;
                self.go_back(self.back);
            }
            Err(failure) => self.failure = Some(failure),
        }
    }

    /// Handles a key.
    pub(super) fn press(&mut self, key: KeyEvent) -> Flow {
        if key.kind == KeyEventKind::Release {
            return Flow::On;
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if control => return Flow::End,
            KeyCode::Esc if self.help => self.help = false,
            KeyCode::Char('q') | KeyCode::Esc => return Flow::End,
            KeyCode::Char('h' | '?') => self.help = !self.help,
            KeyCode::Down | KeyCode::Char('j') => self.go_back(self.back + 1),
            KeyCode::Up | KeyCode::Char('k') => self.go_back(self.back.saturating_sub(1)),
            KeyCode::PageDown => self.go_back(self.back + PAGE),
            KeyCode::PageUp => self.go_back(self.back.saturating_sub(PAGE)),
            KeyCode::Home => self.go_back(0),
            _ => {}
        }
        Flow::On
    }

    fn go_back(&mut self, lines: usize) {
        self.back = lines.min(self.status.events.len().saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::example;

    fn press(screen: &mut Screen, code: KeyCode) -> Flow {
        screen.press(KeyEvent::from(code))
    }

    #[test]
    fn keys_help_scroll_and_end() {
        let mut screen = Screen::of(example::status());
        assert_eq!(press(&mut screen, KeyCode::Char('?')), Flow::On);
        assert!(screen.help);
        assert_eq!(press(&mut screen, KeyCode::Esc), Flow::On);
        assert!(!screen.help);
        // The example has two events.
        press(&mut screen, KeyCode::PageDown);
        assert_eq!(screen.back, 1);
        press(&mut screen, KeyCode::Up);
        press(&mut screen, KeyCode::Up);
        assert_eq!(screen.back, 0);
        assert_eq!(press(&mut screen, KeyCode::Esc), Flow::End);
        assert_eq!(press(&mut screen, KeyCode::Char('q')), Flow::End);
        let key = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(screen.press(key), Flow::End);
    }

    #[test]
    fn the_last_status_stays_when_the_peer_does_not_answer() {
        let mut screen = Screen::of(example::status());
        screen.answer(Err("gone".into()));
        assert_eq!(screen.failure.as_deref(), Some("gone"));
        assert_eq!(screen.status, example::status());
        screen.answer(Ok(example::status()));
        assert_eq!(screen.failure, None);
    }
}
