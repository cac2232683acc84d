//! Download of one file: resumed, bounded and checked against its hash.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Instant;

use crate::digest::FileHash;
use crate::error::HubError;
use crate::http::{Http, Method, Payload, Request, Response};
use crate::progress::Progress;
use crate::refusal::Subject;
use crate::retry::Failure;

/// Bytes after which earlier failures no longer count.
const RESET_AFTER: u64 = 16 << 20;

/// Bytes within `Timeouts::stall` below which a server makes no progress.
const LEAST_PROGRESS: u64 = 1024;

/// Status of an answer with the part of a file that was asked for.
const PARTIAL_CONTENT: u16 = 206;

/// Status of a range that the server does not have.
const RANGE_NOT_SATISFIABLE: u16 = 416;

/// A file to download.
#[derive(Debug)]
pub(crate) struct Transfer<'a> {
    /// The URL.
    pub(crate) url: String,
    /// Whether the endpoint receives the token.
    pub(crate) with_token: bool,
    /// What an error names.
    pub(crate) subject: Subject<'a>,
    /// The name in messages and progress.
    pub(crate) file: &'a str,
    /// Length in bytes.
    pub(crate) length: u64,
    /// The hash.
    pub(crate) hash: &'a FileHash,
    /// The file that holds what has arrived so far.
    pub(crate) partial: &'a Path,
}

impl Transfer<'_> {
    /// Downloads what is missing, checks the hash, and moves the file to its place.
    pub(crate) fn run(
        &self,
        http: &Http,
        destination: &Path,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), HubError> {
        let mut retry = http.retry();
        let mut resumed = self.have()? > 0;
        let mut restarted = false;
        loop {
            let before = self.have()?;
            match self.attempt(http, before, progress) {
                Ok(()) => match self.check() {
                    Ok(()) => return self.finish(destination),
                    // Bytes of an earlier attempt may be the wrong ones: once more from the start.
                    Err(HubError::HashMismatch { .. }) if resumed && !restarted => restarted = true,
                    Err(error) => return Err(error),
                },
                Err(failure) => {
                    let after = self.have()?;
                    resumed |= after > 0;
                    if after.saturating_sub(before) >= RESET_AFTER {
                        retry.reset();
                    }
                    retry.pause(failure)?;
                }
            }
        }
    }

    /// The bytes that are there.
    fn have(&self) -> Result<u64, HubError> {
        match fs::metadata(self.partial) {
            Ok(metadata) => Ok(metadata.len()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
            Err(error) => Err(HubError::io(self.partial)(error)),
        }
    }

    fn attempt(
        &self,
        http: &Http,
        have: u64,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), Failure> {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(self.partial)
            .map_err(HubError::io(self.partial))?;
        let have = if have > self.length { 0 } else { have };
        if have == self.length {
            self.truncate(&mut file, have)?;
            progress(Progress { file: self.file, bytes: have, total: self.length });
            return Ok(());
        }
        let mut request = Request::new(Method::Get, self.url.clone(), Payload::None);
        request.with_token = self.with_token;
        if have > 0 {
            request = request.header("range", format!("bytes={have}-"));
        }
        let response = http.send(&request, self.subject, &mut |_| {})?;
        let Some(start) = self.start_of(&response, have) else {
            self.truncate(&mut file, 0)?;
            let reason = "it answers with another part of the file".to_owned();
            return Err(Failure::Lost { url: response.url().to_owned(), reason });
        };
        if let Some(length) = response.length()
            && start.saturating_add(length) != self.length
        {
            return Err(Failure::Fatal(HubError::WrongLength {
                file: self.file.to_owned(),
                length: self.length,
                actual: start.saturating_add(length),
                url: response.url().to_owned(),
            }));
        }
        self.truncate(&mut file, start)?;
        self.copy(http, response, &mut file, start, progress)
    }

    /// Where the answer begins in the file; `None` if that is not where it may begin.
    fn start_of(&self, response: &Response, have: u64) -> Option<u64> {
        match response.status() {
            PARTIAL_CONTENT => {
                let range = response.header("content-range")?.strip_prefix("bytes ")?;
                let start: u64 = range.split_once('-')?.0.parse().ok()?;
                (start == have).then_some(start)
            }
            RANGE_NOT_SATISFIABLE => None,
            // The server ignores the range.
            _ => Some(0),
        }
    }

    fn truncate(&self, file: &mut File, length: u64) -> Result<(), HubError> {
        if file.metadata().map_err(HubError::io(self.partial))?.len() != length {
            file.set_len(length).map_err(HubError::io(self.partial))?;
        }
        file.seek(SeekFrom::Start(length)).map_err(HubError::io(self.partial))?;
        Ok(())
    }

    /// Writes the answer to the file, up to the file's length.
    fn copy(
        &self,
        http: &Http,
        response: Response,
        file: &mut File,
        start: u64,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), Failure> {
        let stall = http.config().timeouts.stall;
        let mut reader = response.into_reader().take(self.length - start);
        let mut buffer = vec![0; 256 << 10];
        let mut have = start;
        let (mut window, mut window_start) = (Instant::now(), start);
        let half = |have, reason| Failure::Half {
            file: self.file.to_owned(),
            have,
            length: self.length,
            reason,
        };
        progress(Progress { file: self.file, bytes: have, total: self.length });
        while have < self.length {
            let count = match reader.read(&mut buffer) {
                Ok(0) => return Err(half(have, "the connection has ended".to_owned())),
                Ok(count) => count,
                Err(error) => return Err(half(have, error.to_string())),
            };
            file.write_all(&buffer[..count]).map_err(HubError::io(self.partial))?;
            have += count as u64;
            progress(Progress { file: self.file, bytes: have, total: self.length });
            if window.elapsed() > stall {
                if have - window_start < LEAST_PROGRESS && have < self.length {
                    return Err(half(have, "the server is too slow".to_owned()));
                }
                (window, window_start) = (Instant::now(), have);
            }
        }
        Ok(())
    }

    /// Removes the file if its hash is not the expected one.
    fn check(&self) -> Result<(), HubError> {
        let actual = self.hash.of_file(self.partial)?;
        if actual == *self.hash {
            return Ok(());
        }
        fs::remove_file(self.partial).map_err(HubError::io(self.partial))?;
        Err(HubError::HashMismatch {
            file: self.file.to_owned(),
            expected: self.hash.to_string(),
            actual: actual.to_string(),
        })
    }

    fn finish(&self, destination: &Path) -> Result<(), HubError> {
        File::open(self.partial)
            .and_then(|file| file.sync_all())
            .and_then(|()| fs::rename(self.partial, destination))
            .map_err(HubError::io(destination))
    }
}
