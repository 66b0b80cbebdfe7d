//! A headless Chromium, driven by the DevTools protocol over two pipes.
//!
//! With `--remote-debugging-pipe` the browser reads messages from file descriptor 3 and writes them to
//! 4, each a JSON text that ends with a zero byte. A shell opens two named pipes as these.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::WAIT_TIMEOUT;

/// The end of each message.
const END: u8 = 0;
/// The interval in which a condition in the page is evaluated.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A browser with one page. Dropping it ends its process.
pub struct Browser {
    process: Child,
    requests: File,
    messages: Receiver<Value>,
    next_id: u64,
    /// The DevTools session of the page.
    session: Option<String>,
    /// Exceptions and errors that the page has logged, such as violations of its security policy.
    pub problems: Vec<String>,
    _directory: TempDir,
}

impl Browser {
    /// Starts the browser, with an empty page.
    pub fn start() -> Browser {
        let directory = tempfile::tempdir().unwrap();
        let [input, output] = ["in", "out"].map(|name| directory.path().join(name));
        for pipe in [&input, &output] {
            assert!(Command::new("mkfifo").arg(pipe).status().unwrap().success());
        }
        let process = Command::new("sh")
            .args(["-c", "input=$1 output=$2; shift 2; exec \"$@\" 3<\"$input\" 4>\"$output\"", "sh"])
            .args([&input, &output])
            .arg("chromium")
            .args(["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"])
            .args(["--disable-dev-shm-usage", "--no-first-run", "--disable-extensions"])
            .args(["--disable-background-networking", "--disable-component-update", "--mute-audio"])
            .arg(format!("--user-data-dir={}", directory.path().join("profile").display()))
            .arg("about:blank")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // The shell opens the pipes in the same order. Each waits for the other side.
        let requests = File::options().write(true).open(&input).unwrap();
        let answers = File::open(&output).unwrap();
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(answers).split(END).map_while(Result::ok) {
                if sender.send(serde_json::from_slice(&message).unwrap()).is_err() {
                    return;
                }
            }
        });
        let problems = Vec::new();
        let mut browser = Browser {
            process,
            requests,
            messages,
            next_id: 0,
            session: None,
            problems,
            _directory: directory,
        };
        let page = browser.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attached =
            browser.call("Target.attachToTarget", json!({ "targetId": page["targetId"], "flatten": true }));
        browser.session = Some(attached["sessionId"].as_str().unwrap().to_owned());
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser.call("Page.bringToFront", json!({}));
        browser
    }

    /// Calls a method, and returns its result.
    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.next_id += 1;
        let id = self.next_id;
        let mut request = json!({ "id": id, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            request["sessionId"] = json!(session);
        }
        let mut bytes = serde_json::to_vec(&request).unwrap();
        bytes.push(END);
        self.requests.write_all(&bytes).unwrap_or_else(|error| panic!("chromium has ended: {error}"));
        loop {
            let message = self.messages.recv_timeout(WAIT_TIMEOUT);
            let message =
                message.unwrap_or_else(|error| panic!("{method}: chromium does not answer: {error}"));
            if message["id"] == id {
                assert!(message.get("error").is_none(), "{method}: {message}");
                return message["result"].clone();
            }
            self.note(&message);
        }
    }

    /// Keeps exceptions and logged errors.
    fn note(&mut self, message: &Value) {
        let parameters = &message["params"];
        match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => self.problems.push(parameters["exceptionDetails"].to_string()),
            // Requests that fail on purpose are reported as errors of the network.
            Some("Log.entryAdded")
                if parameters["entry"]["level"] == "error" && parameters["entry"]["source"] != "network" =>
            {
                self.problems.push(parameters["entry"].to_string());
            }
            _ => {}
        }
    }

    /// Opens an address.
    pub fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({ "url": url }));
    }

    /// Sets the size of the window, and the colour scheme.
    pub fn set_window(&mut self, width: u32, height: u32, scheme: &str) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", size);
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.call("Emulation.setEmulatedMedia", json!({ "features": features }));
    }

    /// The value of a JavaScript expression.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let parameters = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let result = self.call("Runtime.evaluate", parameters);
        assert!(result.get("exceptionDetails").is_none(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// Waits until an expression is true. Panics after a timeout, with the text of the page.
    pub fn wait_for(&mut self, expression: &str) {
        let began = Instant::now();
        while self.evaluate(&format!("Boolean({expression})")) != json!(true) {
            if began.elapsed() > WAIT_TIMEOUT {
                let page = self.evaluate("document.body.innerText");
                panic!("timed out: {expression}; problems: {:?}; page: {page}", self.problems);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Sets the focus to an element, when it is there.
    pub fn focus(&mut self, selector: &str) {
        let found = format!("document.querySelector({})", json!(selector));
        self.wait_for(&found);
        self.evaluate(&format!("{found}.focus()"));
    }

    /// Presses a key that has this name, in the element with the focus.
    pub fn press(&mut self, key: &str) {
        let (code, text) = match key {
            "Enter" => (13, "\r"),
            "Tab" => (9, ""),
            "ArrowDown" => (40, ""),
            "Escape" => (27, ""),
            _ => (0, key),
        };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code });
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = json!(text);
            }
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// Enters a text into the element with the focus.
    pub fn enter(&mut self, text: &str) {
        self.call("Input.insertText", json!({ "text": text }));
    }

    /// Writes a picture of the window to a file.
    pub fn screenshot(&mut self, path: &Path) {
        let picture = self.call("Page.captureScreenshot", json!({ "format": "png" }));
        std::fs::write(path, decode_base64(picture["data"].as_str().unwrap())).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The processes that it has started end with it.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn decode_base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = text.bytes().filter_map(|byte| DIGITS.iter().position(|digit| *digit == byte));
    let digits: Vec<u32> = digits.map(|digit| digit as u32).collect();
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    for group in digits.chunks(4) {
        let bits = group.iter().fold(0, |bits, digit| bits << 6 | digit) << (6 * (4 - group.len()));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    bytes
}

#[test]
fn base64_is_decoded() {
    assert_eq!(decode_base64("aGVsbG8gd29ybGQ="), b"hello world");
    assert_eq!(decode_base64("/+8="), [0xff, 0xef]);
}
