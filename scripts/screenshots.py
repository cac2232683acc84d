"""Takes pictures of a run: the web page on a wide and on a small screen, a moving one of it while a peer is killed, and
`shoal top`. Checks the page
as well: no error on the browser's console, no request to another server, nothing wider than the screen, an
accessible name for every control, and use by keyboard alone.

    make screenshots

A swarm of local processes trains and loses some of them, while an observer shows the run. Skips, with the
reason, what this machine lacks.
"""

import argparse
import contextlib
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

import animation
import browser as browsers
import terminal

PATIENCE = 300.0
LARGEST = 300_000
# The moving picture: the page, its scale, the frames and the time between them. A peer is killed every six seconds.
MOVING = (1280, 1335, 0.6)
FRAMES = 10
FRAME_SECONDS = 1.0
LARGEST_MOVING = 1_500_000
# The points of the loss curve from which a picture is taken.
POINTS = 25
SCREENS = [
    ("page-wide", 1280, 1000, 1.0, False),
    ("page-phone", 390, 844, 1.0, True),
]
NEED_NAMES = {"button", "list", "image", "img", "table", "region", "group", "heading", "link"}


def say(text):
    print(f"screenshots: {text}", flush=True)


@contextlib.contextmanager
def process(*command, log):
    """A process that ends with its block."""
    with open(log, "wb") as file:
        running = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            yield running
        finally:
            running.send_signal(signal.SIGTERM)
            try:
                running.wait(timeout=20)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


@contextlib.contextmanager
def swarm(shoal, folder):
    """A swarm with deaths, and an observer of it. Gives the data directory and the process of the observer."""
    demo, home = folder / "demo", folder / "observer"
    command = [shoal, "demo", "--peers", "6", "--stages", "3", "--steps", "2000", "--kill-every", "6",
               "--anchors", "3", "--no-reference", "--out", str(demo)]
    with process(*command, log=folder / "demo.log"):
        anchors = [f"@{demo}/peers/address-{index}" for index in range(3)]
        command = [shoal, "join", *anchors, "--observer", "--data-dir", str(home), "--no-mdns",
                   "--listen", "127.0.0.1:0"]
        with process(*command, log=folder / "observer.log") as observer:
            yield home, observer


def until(what, look):
    """Waits until `look` finds something, and returns it."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            found = look()
            if found:
                return found
        time.sleep(0.5)
    sys.exit(f"screenshots: {what} did not come within {PATIENCE:.0f} s")


def status(url):
    """The status that a node has of its run."""
    with urllib.request.urlopen(f"{url}/status", timeout=10) as answer:
        return json.load(answer)


def is_worth_a_picture(url):
    """Whether the run has a curve and a death to show, and every stage is served."""
    seen = status(url)
    serving = {stage for member in seen["members"] if member["state"] == "serving"
               for stage in member["stages"]}
    gone = any("is gone" in event["text"] for event in seen["events"])
    return gone and len(seen["curves"]["loss"]) >= POINTS and len(serving) == seen["run"]["stages"]


def check_size(path, largest=LARGEST):
    """Checks that a picture is small enough for the documentation."""
    size = path.stat().st_size
    if size > largest:
        sys.exit(f"screenshots: {path} has {size} bytes, more than {largest}")
    say(f"{path}: {size} bytes")


def picture_page(page, url, out):
    """Takes pictures of the page on every screen, and checks it."""
    for name, width, height, scale, dark in SCREENS:
        page.size(width, height, scale, dark)
        page.open(url)
        page.until("Number(document.body?.dataset.polls) >= 3")
        widest = page.value("document.documentElement.scrollWidth")
        if widest > width:
            sys.exit(f"screenshots: {name} is {widest} pixels wide, its screen {width}")
        check_names(page)
        path = out / f"{name}.png"
        page.picture(path, whole=True)
        check_size(path)
    check_keyboard(page)
    check_hostile(page, url)
    elsewhere = [asked for asked in page.asked if not asked.startswith((url, "data:", "about:"))]
    if elsewhere:
        sys.exit(f"screenshots: the page sent requests elsewhere: {elsewhere}")
    if page.errors:
        sys.exit("screenshots: errors on the page's console:\n" + "\n".join(page.errors))


def picture_kill(page, url, out):
    """Takes a moving picture of the page while peers are killed and others join."""
    page.size(*MOVING)
    page.open(url)
    page.until("Number(document.body?.dataset.polls) >= 2")
    frames, begun = [], time.monotonic()
    for number in range(FRAMES):
        # The time of a film passes; there is nothing to wait for.
        time.sleep(max(0.0, begun + number * FRAME_SECONDS - time.monotonic()))
        page.picture(out / "kill.png")
        frames.append((out / "kill.png").read_bytes())
    (out / "kill.png").write_bytes(animation.animated(frames, FRAME_SECONDS))
    check_size(out / "kill.png", LARGEST_MOVING)


def check_names(page):
    """Checks that every control and figure has an accessible name."""
    told = page.accessible()
    roles = {role.lower() for role, _ in told}
    nameless = sorted({role for role, name in told if role.lower() in NEED_NAMES and not name})
    if nameless or "button" not in roles:
        sys.exit(f"screenshots: without a name: {nameless}; roles: {sorted(roles)}")


def check_keyboard(page):
    """Checks that Tab reaches a member, Enter opens it and Escape closes it."""
    for _ in range(10):
        page.press("Tab", 9)
        if page.value("document.activeElement.className.startsWith('member')"):
            break
    else:
        sys.exit("screenshots: the keyboard does not reach a member")
    page.press("Enter", 13, "\r")
    page.until("document.querySelectorAll('.member[aria-expanded=true] .detail').length > 1")
    page.press("Escape", 27)
    page.until("document.querySelectorAll('.member[aria-expanded=true]').length === 0")


def check_hostile(page, url):
    """Checks that the page shows a status full of markup as text."""
    markup = '</script><img src=x onerror="window.obeyed=1"><script>window.obeyed=1</script>'
    seen = status(url)

    def spoil(value):
        if isinstance(value, dict):
            return {name: spoil(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [spoil(inner) for inner in value]
        return value + markup if isinstance(value, str) else value

    for event in seen["events"]:
        event["text"] += markup
    for member in seen["members"]:
        member.update(spoil({"peer": member["peer"], "addresses": member["addresses"]}))
    seen["node"].update(why=markup, state=markup, peer=markup)
    seen["run"].update(id=markup + seen["run"]["id"], coordinator=markup)
    before = page.value("document.body.dataset.polls")
    page.answer("*/status", json.dumps(seen).encode())
    page.until(f"Number(document.body.dataset.polls) > Number({before}) + 2")
    page.until("document.getElementById('notice').textContent.includes('onerror')")
    added = page.value("document.querySelectorAll('img, body script ~ script, iframe, [onerror]').length")
    if added or page.value("window.obeyed === 1"):
        sys.exit("screenshots: the page interprets markup in a status")


def picture_top(page, shoal, home, folder, out):
    """Takes a picture of `shoal top` in a tmux terminal."""
    socket = folder / "tmux"
    tmux = ["tmux", "-u", "-S", str(socket)]
    run = lambda *command: subprocess.run(
        [*tmux, *command], check=True, capture_output=True, text=True).stdout
    run("-f", "/dev/null", "new-session", "-d", "-x", "120", "-y", "38",
        f"{shoal} top --data-dir {home}")
    try:
        text = until("shoal top", lambda: captured(run))
        file = folder / "top.html"
        file.write_text(terminal.page(text), encoding="utf-8")
        page.size(1200, 800)
        page.open(file.as_uri())
        page.until("document.readyState === 'complete' && document.querySelector('pre') !== null")
        wide = page.value("Math.ceil(document.querySelector('pre').getBoundingClientRect().width)")
        page.size(wide, 640)
        page.picture(out / "top.png", whole=True)
        check_size(out / "top.png")
        run("send-keys", "q")
    finally:
        subprocess.run([*tmux, "kill-server"], check=False, capture_output=True)


def captured(run):
    """The content of the terminal, once it is drawn."""
    text = run("capture-pane", "-e", "-p")
    return text if "members" in text and "serving" in text else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shoal", required=True)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/screenshots"))
    options = parser.parse_args()
    shoal = str(pathlib.Path(options.shoal).resolve())
    program = browsers.installed()
    if not program:
        return say("skipped: Chromium is not installed (apt install chromium)")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shoal-pictures-", ignore_cleanup_errors=True) as name:
        folder = pathlib.Path(name)
        with swarm(shoal, folder) as (home, _), browsers.Browser(program) as page:
            address = until("the observer", lambda: (home / "http").read_text().strip())
            url = f"http://{address}"
            until("a run with deaths", lambda: is_worth_a_picture(url))
            picture_kill(page, url, options.out)
            picture_page(page, url, options.out)
            if shutil.which("tmux"):
                picture_top(page, shoal, home, folder, options.out)
            else:
                say("skipped: shoal top: tmux is not installed (apt install tmux)")


if __name__ == "__main__":
    main()
