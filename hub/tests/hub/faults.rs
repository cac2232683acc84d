//! Faults of the server and the network.

use std::fs;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use shoal_hub::{Hub, HubError};

use crate::repository::{
    answer, bytes, config, download, first, hub, ignore, reference, refusal, stored,
};
use crate::server::{Answer, Server};

/// The message for a status and code of the first answer.
fn refused(status: u16, code: &str, with_token: bool) -> String {
    let cache = tempfile::tempdir().expect("a folder");
    let code = code.to_owned();
    let server =
        Server::start(move |_| Answer::new(status, "").header("x-error-code", code.clone()));
    let mut settings = config(&server.url(), cache.path());
    if !with_token {
        settings.token = None;
    }
    let error = refusal(&Hub::new(settings).expect("a client"));
    assert_eq!(server.asked().len(), 1, "a refusal is not tried again");
    error
}

#[test]
fn refusals_say_what_to_do() {
    assert!(refused(401, "", false).contains("check the name, or set HF_TOKEN"));
    assert!(refused(401, "", true).contains("does not accept the access token"));
    let gated = refused(403, "GatedRepo", true);
    assert!(gated.contains("owner/name is gated: set HF_TOKEN and accept its licence at http://"));
    assert!(gated.ends_with("/owner/name"), "{gated}");
    assert!(refused(401, "GatedRepo", false).contains("is gated"));
    assert!(refused(403, "", true).contains("refuses access to owner/name"));
    assert!(refused(404, "RepoNotFound", true).contains("there is no repository owner/name"));
    let revision = refused(404, "RevisionNotFound", true);
    assert!(revision.contains("owner/name has no branch, tag or commit main"), "{revision}");
    assert!(refused(418, "", true).contains("with status 418"));
}

#[test]
fn a_missing_file_is_named() {
    let cache = tempfile::tempdir().expect("a folder");
    let server = Server::start(|asked| {
        if asked.path.contains("/resolve/") {
            return Answer::new(404, "");
        }
        answer(&[stored("config.json", "{}", false)], asked)
    });
    let error = refusal(&hub(&server.url(), cache.path()));
    assert!(error.contains("there is no file config.json at http://"), "{error}");
}

#[test]
fn a_busy_server_is_tried_again_after_the_time_it_asks_for() {
    let cache = tempfile::tempdir().expect("a folder");
    let count = AtomicUsize::new(0);
    let server = Server::start(move |asked| {
        if asked.path.contains("/revision/") && first(&count) {
            return Answer::new(429, "").header("retry-after", "3600");
        }
        answer(&[stored("config.json", "{}", false)], asked)
    });
    let start = Instant::now();
    download(&hub(&server.url(), cache.path())).expect("downloaded");
    let waited = start.elapsed();
    assert!(waited >= Duration::from_millis(40) && waited < Duration::from_secs(60), "{waited:?}");

    let server = Server::start(|_| Answer::new(429, "").header("retry-after", "0"));
    let error = refusal(&hub(&server.url(), cache.path()));
    assert!(error.contains("limits the rate of requests"), "{error}");
    assert_eq!(server.asked().len(), 3);
}

#[test]
fn a_failing_server_is_tried_again() {
    let cache = tempfile::tempdir().expect("a folder");
    let (list, file) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let server = Server::start(move |asked| {
        let fails = asked.path.contains("/tree/") && first(&list)
            || asked.path.contains("/resolve/") && first(&file);
        if fails { Answer::new(500, "") } else { answer(&[stored("a", "aa", false)], asked) }
    });
    download(&hub(&server.url(), cache.path())).expect("downloaded");

    let cache = tempfile::tempdir().expect("a folder");
    let server = Server::start(|_| Answer::new(503, ""));
    let error = refusal(&hub(&server.url(), cache.path()));
    assert!(error.contains("fails with status 503"), "{error}");
    assert_eq!(server.asked().len(), 3);
}

#[test]
fn half_a_file_is_resumed_where_it_broke_off() {
    let file = stored("model.bin", bytes(300_000), true);
    let cache = tempfile::tempdir().expect("a folder");
    let count = AtomicUsize::new(0);
    let server = Server::start(move |asked| {
        let answered = answer(std::slice::from_ref(&file), asked);
        let cut = asked.path.contains("/resolve/") && first(&count);
        if cut { answered.cut(100_000) } else { answered }
    });
    let snapshot = download(&hub(&server.url(), cache.path())).expect("downloaded");
    assert_eq!(fs::read(&snapshot.files[0].local).expect("a file"), bytes(300_000));
    let asked = server.asked_for("/resolve/");
    let ranges: Vec<_> = asked.iter().map(|asked| asked.header("range")).collect();
    assert_eq!(ranges, [None, Some("bytes=100000-")]);
}

#[test]
fn what_has_arrived_stays_for_the_next_process() {
    let file = stored("model.bin", bytes(300_000), true);
    let cache = tempfile::tempdir().expect("a folder");
    let partial = format!("models--owner--name/blobs/{}.incomplete", file.hash());
    {
        let file = file.clone();
        let server = Server::start(move |asked| {
            let answered = answer(std::slice::from_ref(&file), asked);
            match (asked.path.contains("/resolve/"), asked.range_start()) {
                (true, None) => answered.cut(100_000),
                (true, Some(_)) => answered.cut(0),
                _ => answered,
            }
        });
        let error = refusal(&hub(&server.url(), cache.path()));
        assert!(error.contains("model.bin breaks off after 100000 of 300000 bytes"), "{error}");
        assert_eq!(server.asked_for("/resolve/").len(), 3);
    }
    let left = fs::metadata(cache.path().join(&partial)).expect("a part").len();
    assert_eq!(left, 100_000);
    let server = Server::start(move |asked| answer(std::slice::from_ref(&file), asked));
    download(&hub(&server.url(), cache.path())).expect("resumed");
    let asked = server.asked_for("/resolve/");
    assert_eq!(asked[0].header("range"), Some("bytes=100000-"));
    assert!(!cache.path().join(partial).exists());
}

#[test]
fn a_server_that_ignores_ranges_sends_the_file_again() {
    let file = stored("model.bin", bytes(300_000), true);
    let cache = tempfile::tempdir().expect("a folder");
    let count = AtomicUsize::new(0);
    let server = Server::start(move |asked| {
        if !asked.path.contains("/resolve/") {
            return answer(std::slice::from_ref(&file), asked);
        }
        let whole = Answer::new(200, file.bytes.clone());
        if first(&count) { whole.cut(100_000) } else { whole }
    });
    let snapshot = download(&hub(&server.url(), cache.path())).expect("downloaded");
    assert_eq!(fs::read(&snapshot.files[0].local).expect("a file"), bytes(300_000));
    assert_eq!(server.asked_for("/resolve/").len(), 2);
}

#[test]
fn another_range_than_the_one_asked_for_is_not_used() {
    let file = stored("model.bin", bytes(3000), true);
    let cache = tempfile::tempdir().expect("a folder");
    let count = AtomicUsize::new(0);
    let server = Server::start(move |asked| {
        let answered = answer(std::slice::from_ref(&file), asked);
        if asked.path.contains("/resolve/") && first(&count) {
            return answered.cut(1000);
        }
        if asked.range_start().is_some() {
            return Answer::new(206, &file.bytes[500..])
                .header("content-range", "bytes 500-2999/3000");
        }
        answered
    });
    let snapshot = download(&hub(&server.url(), cache.path())).expect("downloaded");
    assert_eq!(fs::read(&snapshot.files[0].local).expect("a file"), bytes(3000));
    assert_eq!(server.asked_for("/resolve/").len(), 3);
}

#[test]
fn wrong_bytes_are_refused() {
    for lfs in [false, true] {
        let file = stored("model.bin", bytes(1000), lfs);
        let cache = tempfile::tempdir().expect("a folder");
        let expected = file.hash();
        let server = Server::start(move |asked| {
            if asked.path.contains("/resolve/") {
                return Answer::new(200, vec![7; 1000]);
            }
            answer(std::slice::from_ref(&file), asked)
        });
        let error = refusal(&hub(&server.url(), cache.path()));
        assert!(error.contains(&format!("does not match its hash {expected}")), "{error}");
        assert_eq!(server.asked_for("/resolve/").len(), 1);
        let blobs = cache.path().join("models--owner--name/blobs");
        assert_eq!(fs::read_dir(blobs).expect("a folder").count(), 0, "nothing wrong stays");
    }
}

#[test]
fn wrong_bytes_of_an_earlier_attempt_are_replaced_once() {
    let file = stored("model.bin", bytes(1000), true);
    let cache = tempfile::tempdir().expect("a folder");
    let blobs = cache.path().join("models--owner--name/blobs");
    fs::create_dir_all(&blobs).expect("a folder");
    fs::write(blobs.join(format!("{}.incomplete", file.hash())), [7; 600]).expect("written");
    let server = Server::start(move |asked| answer(std::slice::from_ref(&file), asked));
    download(&hub(&server.url(), cache.path())).expect("downloaded");
    let asked = server.asked_for("/resolve/");
    let ranges: Vec<_> = asked.iter().map(|asked| asked.header("range")).collect();
    assert_eq!(ranges, [Some("bytes=600-"), None]);
}

#[test]
fn another_length_is_refused_before_the_bytes() {
    let file = stored("model.bin", bytes(1000), true);
    let cache = tempfile::tempdir().expect("a folder");
    let server = Server::start(move |asked| {
        if asked.path.contains("/resolve/") {
            return Answer::new(200, vec![7; 100_000]);
        }
        answer(std::slice::from_ref(&file), asked)
    });
    let error = refusal(&hub(&server.url(), cache.path()));
    assert!(error.contains("has 100000 bytes instead of 1000"), "{error}");
}

#[test]
fn a_silent_server_is_left_after_the_timeout() {
    let file = stored("model.bin", bytes(100_000), true);
    let cache = tempfile::tempdir().expect("a folder");
    let silence = Duration::from_secs(60);
    let server = Server::start(move |asked| {
        let answered = answer(std::slice::from_ref(&file), asked);
        if asked.path.contains("/resolve/") && asked.range_start().is_none() {
            return answered.cut(50_000).then_silent(silence);
        }
        answered
    });
    let mut settings = config(&server.url(), cache.path());
    settings.timeouts.stall = Duration::from_secs(1);
    let start = Instant::now();
    download(&Hub::new(settings).expect("a client")).expect("resumed");
    assert!(start.elapsed() < silence, "{:?}", start.elapsed());
    let asked = server.asked_for("/resolve/");
    assert_eq!(asked.len(), 2);
    assert_eq!(asked[1].header("range"), Some("bytes=50000-"));
}

#[test]
fn no_answer_is_a_timeout() {
    let cache = tempfile::tempdir().expect("a folder");
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let address = listener.local_addr().expect("an address");
    let mut settings = config(&format!("http://{address}"), cache.path());
    settings.timeouts.response = Duration::from_millis(100);
    let error = refusal(&Hub::new(settings).expect("a client"));
    assert!(error.contains("cannot be reached: timeout"), "{error}");
}

#[test]
fn hosts_that_do_not_exist_or_answer_are_named() {
    let cache = tempfile::tempdir().expect("a folder");
    let error = refusal(&hub("http://no-such-host.invalid", cache.path()));
    assert!(error.contains("no host no-such-host.invalid is known"), "{error}");
    let closed = {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        listener.local_addr().expect("an address")
    };
    let error = refusal(&hub(&format!("http://{closed}"), cache.path()));
    assert!(error.contains("cannot be reached"), "{error}");
}

#[test]
fn answers_that_are_no_json_or_too_long_are_refused() {
    let cache = tempfile::tempdir().expect("a folder");
    let server = Server::start(|_| Answer::new(200, "<html>log in to the hotel</html>"));
    let error = refusal(&hub(&server.url(), cache.path()));
    assert!(error.contains("is not that of a Hub"), "{error}");
    let server = Server::start(|_| Answer::new(200, vec![b' '; (16 << 20) + 1]));
    let error = refusal(&hub(&server.url(), cache.path()));
    assert!(error.contains("is longer than 16777216 bytes"), "{error}");
}

#[test]
fn certificates_that_cannot_be_read_are_named() {
    let cache = tempfile::tempdir().expect("a folder");
    let mut settings = config("https://127.0.0.1:1", cache.path());
    let path = cache.path().join("ca.pem");
    fs::write(&path, "no certificate").expect("written");
    settings.certificates = Some(path);
    let error = Hub::new(settings).expect_err("refused");
    assert!(matches!(error, HubError::Certificates { .. }), "{error}");
    assert!(error.to_string().contains("unset SSL_CERT_FILE"), "{error}");
}

#[test]
fn a_server_without_tls_is_an_error_in_one_line() {
    let cache = tempfile::tempdir().expect("a folder");
    let server = Server::start(|_| Answer::new(200, ""));
    let endpoint = server.url().replace("http://", "https://");
    let failed = hub(&endpoint, cache.path()).download(&reference("hf:owner/name"), &mut ignore);
    assert!(!failed.expect_err("no TLS").to_string().contains('\n'));
}
