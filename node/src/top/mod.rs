//! A run in the terminal: asks a peer every second and draws what it says.

mod screen;
mod view;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use crossterm::event::{Event, EventStream};
use futures::StreamExt;
use ratatui::DefaultTerminal;
use tokio::signal::unix::{SignalKind, signal};

use self::screen::{Flow, Screen};
use crate::exit::one_line;
use crate::http::client;
use crate::status::Status;

/// From one answer to the next question.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// Shows the run until the user, or a signal, ends it. The terminal is as it was before, then and also
/// after a panic.
///
/// # Errors
/// When the peer does not answer at first, or there is no terminal.
pub(crate) async fn watch(address: SocketAddr) -> anyhow::Result<()> {
    let status = client::status(address).await?;
    let mut terminal = ratatui::try_init().context("the terminal cannot be drawn on")?;
    let shown = show(&mut terminal, address, Screen::of(status)).await;
    ratatui::restore();
    shown
}

async fn show(
    terminal: &mut DefaultTerminal,
    address: SocketAddr,
    mut screen: Screen,
) -> anyhow::Result<()> {
    let mut ends = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()]
        .map(signal)
        .into_iter()
        .collect::<std::io::Result<Vec<_>>>()?;
    let mut keys = EventStream::new();
    let mut asking = Box::pin(ask(address));
    loop {
        terminal.draw(|frame| view::draw(frame, &screen))?;
        let ended = futures::future::select_all(ends.iter_mut().map(|end| Box::pin(end.recv())));
        tokio::select! {
            answer = &mut asking => {
                screen.answer(answer.map_err(|error| one_line(&error)));
                asking = Box::pin(ask(address));
            }
            event = keys.next() => match event.context("the terminal is gone")?? {
                Event::Key(key) if screen.press(key) == Flow::End => return Ok(()),
                // A new size is seen when it is drawn.
                _ => {}
            },
            _ = ended => return Ok(()),
        }
    }
}

async fn ask(address: SocketAddr) -> anyhow::Result<Status> {
    tokio::time::sleep(ASK_EVERY).await;
    client::status(address).await
}
