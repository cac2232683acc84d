//! `shoal top`: polls a peer's status every second and draws it in the terminal.

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

/// Pause from an answer to the next request.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// Shows the run until the user or a signal ends it. Restores the terminal at the end, also after a
/// panic.
///
/// # Errors
/// If the peer does not answer the first request, or there is no terminal.
pub(crate) async fn watch(address: SocketAddr) -> anyhow::Result<()> {
    let status = client::status(address).await?;
    let mut terminal = ratatui::try_init().context("cannot draw on the terminal")?;
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
                // The next draw uses the new size.
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
