//! An S3 server on a temporary directory: versitygw, which `make test` builds.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tempfile::TempDir;

use super::POLL;
use super::ports::Port;

/// Where `make` puts it.
const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/tools/versitygw");

const BUCKET: &str = "fulmar";
const ACCESS_KEY: &str = "fulmar";
const SECRET_KEY: &str = "not-a-secret";

const START_TIMEOUT: Duration = Duration::from_secs(30);

/// An S3 server that runs, with one empty bucket. It ends when this is dropped, and its data with it.
pub struct S3Server {
    child: Child,
    endpoint: String,
    // Dropped last: the process is gone by then.
    directory: TempDir,
    _port: Port,
}

impl S3Server {
    /// Starts the server that `make` has built.
    pub fn start() -> anyhow::Result<S3Server> {
        Self::start_program(Path::new(PROGRAM), None)
    }

    /// Starts another versitygw.
    pub fn start_at(program: &Path) -> anyhow::Result<S3Server> {
        Self::start_program(program, None)
    }

    /// The same, speaking TLS with this certificate and this key.
    pub fn start_with_tls(certificate: &Path, key: &Path) -> anyhow::Result<S3Server> {
        Self::start_program(Path::new(PROGRAM), Some((certificate, key)))
    }

    fn start_program(program: &Path, tls: Option<(&Path, &Path)>) -> anyhow::Result<S3Server> {
        ensure!(program.exists(), "there is no S3 server at {}; run `make tools`", program.display());
        let directory =
            tempfile::Builder::new().prefix("fulmar-s3-").tempdir().context("no temporary directory")?;
        // A bucket is a directory of the server's.
        let root = directory.path().join("root");
        std::fs::create_dir_all(root.join(BUCKET))?;
        let taken = Port::free()?;
        let port = taken.number();
        let mut command = Command::new(program);
        command.args(["--quiet", "--port", &format!("127.0.0.1:{port}")]);
        if let Some((certificate, key)) = tls {
            command.arg("--cert").arg(certificate).arg("--key").arg(key);
        }
        command.arg("posix").arg(&root);
        command.env("ROOT_ACCESS_KEY", ACCESS_KEY).env("ROOT_SECRET_KEY", SECRET_KEY);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        // A certificate names a host, not an address.
        let endpoint = format!("{scheme}://localhost:{port}");
        let mut server = S3Server { child, endpoint, directory, _port: taken };
        server.wait_for(port)?;
        Ok(server)
    }

    fn wait_for(&mut self, port: u16) -> anyhow::Result<()> {
        let begin = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            ensure!(self.child.try_wait()?.is_none(), "the S3 server ended at once");
            ensure!(begin.elapsed() < START_TIMEOUT, "the S3 server does not answer");
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// A store in its bucket.
    pub fn url(&self, prefix: &str) -> String {
        format!("s3://{BUCKET}/{prefix}")
    }

    /// The bucket's name.
    pub fn bucket(&self) -> &'static str {
        BUCKET
    }

    /// The variables of the environment that let a client in.
    pub fn environment(&self) -> Vec<(String, String)> {
        [
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
            ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ENDPOINT_URL", &self.endpoint),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into()
    }

    /// Where it keeps the objects of its bucket, as files of their names.
    pub fn objects(&self) -> PathBuf {
        self.directory.path().join("root").join(BUCKET)
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
