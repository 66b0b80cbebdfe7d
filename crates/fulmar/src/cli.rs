//! What can be asked of `fulmar`, and the help that teaches it.

mod events;
mod tenant;
mod token;
mod top;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use fulmar_engine::{MAX_STATEMENT_BYTES, MIN_STATEMENT_BYTES};
use fulmar_store::StoreUrl;
use fulmar_workload::compare::{CompareArgs, StoreArgs, Suite, cases};
use fulmar_workload::figure::FigureArgs;
use fulmar_workload::run::RunArgs;
use fulmar_workload::tatp::Tatp;
use fulmar_workload::tpcc::Tpcc;
use fulmar_workload::tpcw::Tpcw;
use fulmar_workload::voter::Voter;
use fulmar_workload::ycsb::Ycsb;

use crate::size::Bytes;
pub use events::EventsArgs;
pub use tenant::{ExecArgs, ExportArgs, ImportArgs, LoadArgs, TenantAction, TenantArgs};
pub use token::{TokenAction, TokenArgs};
pub use top::{Sort, TopArgs};

const EXAMPLES: &str = "\
Try it:
  fulmar demo                                   one minute: a node, 100 tenants, a crash

Run a node on this machine, without passwords:
  fulmar start --data ./data --sql 127.0.0.1:5433 --http 127.0.0.1:8080 --insecure
  fulmar tenant create shop --server postgres://fulmar@127.0.0.1:5433
  psql postgres://fulmar@127.0.0.1:5433/shop

The protocol is PostgreSQL's, the SQL is SQLite's.";

/// Fulmar: thousands of small SQL databases in one process, over the Postgres protocol.
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a node in the foreground
    Start(StartArgs),
    /// Create, drop, rename and list tenants; load, export and import; run a script in many
    Tenant(TenantArgs),
    /// Create, drop and list tokens for HTTP
    Token(TokenArgs),
    /// Show what happened on a node, and go on
    Events(EventsArgs),
    /// Read all data, and compare it with its checksums
    Verify(VerifyArgs),
    /// Show how a node is
    Status(StatusArgs),
    /// Show which tenants are busy now
    Top(TopArgs),
    /// Run workloads, and compare with PostgreSQL
    Bench(BenchArgs),
    /// Show in one minute what Fulmar does
    Demo(DemoArgs),
}

const START_EXAMPLES: &str = "\
On this machine only, without passwords:
  fulmar start --data ./data --sql 127.0.0.1:5433 --http 127.0.0.1:8080 --insecure

For others, with passwords and TLS:
  fulmar start --data /var/lib/fulmar --sql 0.0.0.0:5433 --http 127.0.0.1:8080 \\
      --memory 8GiB --tls-cert server.crt --tls-key server.key
  psql \"postgres://fulmar@db.example:5433/fulmar?sslmode=require\"

With the data in S3 (any server that speaks its protocol), and the log on this machine's disk:
  export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... AWS_REGION=eu-central-1
  export AWS_ENDPOINT_URL=https://s3.example           # if it is not Amazon's
  fulmar start --data /var/lib/fulmar --store s3://bucket/fulmar --sql 0.0.0.0:5433 --http 127.0.0.1:8080

Beside that node, on any machine that reaches the store: its databases, to be read (SET fulmar.staleness):
  fulmar start --read-only --store s3://bucket/fulmar --sql 0.0.0.0:5434 --http 127.0.0.1:8081

The first start without --insecure makes the superuser `fulmar` and writes its password to
DIR/superuser-password, which only the owner of that file can read.

When the node takes connections it prints one line on stdout: `fulmar ready: ...`.
SIGINT and SIGTERM end it cleanly; running statements get a few seconds. Logs go to stderr.";

/// `fulmar start`
#[derive(Args, Debug)]
#[command(after_help = START_EXAMPLES)]
pub struct StartArgs {
    /// Where everything is kept; made if it is not there. One process at a time
    #[arg(long, value_name = "DIR", required_unless_present = "read_only")]
    pub data: Option<PathBuf>,
    /// Read the databases of another node beside it: everything comes from its --store, nothing is written there or kept. Large
    /// answers wait in a directory of TMPDIR
    #[arg(long, requires = "store", conflicts_with = "data")]
    pub read_only: bool,
    /// Where segments and manifests are kept: file:///directory, s3://bucket/prefix, or memory: for tests. Always
    /// the same one for a data directory [default: a directory in it]
    #[arg(long, value_name = "URL")]
    pub store: Option<StoreUrl>,
    /// Use the catalog in DIR at this revision although newer changes of tenants, users and privileges are lost. Only after a start
    /// was refused with this remedy
    #[arg(long, value_name = "REVISION", conflicts_with = "read_only")]
    pub accept_catalog: Option<u64>,
    /// Where clients of the Postgres protocol connect
    #[arg(long, value_name = "ADDR:PORT")]
    pub sql: SocketAddr,
    /// Where /healthz and /metrics are served; /metrics wants a token
    #[arg(long, value_name = "ADDR:PORT")]
    pub http: SocketAddr,
    /// Memory of the node: 256MB, 1GiB, or plain bytes. Pages get what everything else leaves of it, but half in any case
    /// [default: half of this machine's]
    #[arg(long, value_name = "BYTES")]
    pub memory: Option<Bytes>,
    /// Space of the disk that is kept free: writers are refused before it is full. 0 for none
    /// [default: 1GiB, or 5 % of the disk if that is less]
    #[arg(long, value_name = "BYTES")]
    pub disk_reserve: Option<Bytes>,
    /// Space of the disk that may hold copies of what was read from a store in S3, so that it is read there once. 0 for none;
    /// else at least 64MB
    #[arg(long, value_name = "BYTES", conflicts_with = "read_only")]
    pub disk_cache: Option<Bytes>,
    /// Address space of a statement's stack. A statement that needs more than a sixteenth of it gets SQLSTATE 54001. At least 4MiB
    #[arg(long, value_name = "BYTES", default_value = "16MiB", hide = true)]
    pub statement_stack: Bytes,
    /// The longest SQL text of one statement, 64KiB to 16MiB. A script of many statements may be longer
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = statement_size)]
    pub max_statement_size: Bytes,
    /// Certificate chain, PEM; clients may then use TLS. Read again when it changes, and on SIGHUP
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Serve /metrics without a token: for an address that only your monitoring reaches
    #[arg(long)]
    pub public_metrics: bool,
    /// No passwords: everybody who can connect is superuser. Loopback addresses only
    #[arg(long)]
    pub insecure: bool,
    /// Log statements that take longer than so many milliseconds, without their literals; 0 for none
    #[arg(long, default_value_t = 1000, value_name = "MS")]
    pub slow_statement: u64,
    /// How logs are written
    #[arg(long, value_enum, default_value_t = LogFormat::Text, value_name = "FORMAT")]
    pub log_format: LogFormat,
    /// What is logged: error, warn, info, debug, trace, or as in fulmar_gateway=debug,info
    #[arg(long, env = "RUST_LOG", default_value = "info", value_name = "LEVEL")]
    pub log_level: String,
}

/// A size that the engine accepts for statements.
fn statement_size(text: &str) -> Result<Bytes, String> {
    let size: Bytes = text.parse()?;
    let (least, most) = (Bytes(MIN_STATEMENT_BYTES as u64), Bytes(MAX_STATEMENT_BYTES as u64));
    match (least..=most).contains(&size) {
        true => Ok(size),
        false => Err(format!("must be between {least} and {most}")),
    }
}

/// How logs are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Which node to ask, and how.
#[derive(Args, Debug)]
pub struct ServerArgs {
    /// The node: postgres://USER:PASSWORD@HOST:PORT; sslmode and sslrootcert behind it as for psql
    #[arg(long, global = true, env = "FULMAR_SERVER", value_name = "URL", hide_env_values = true)]
    #[arg(default_value = "postgres://fulmar@127.0.0.1:5433")]
    pub server: String,
    /// A file that holds the password
    #[arg(long, global = true, value_name = "FILE")]
    pub password_file: Option<PathBuf>,
}

const VERIFY_EXAMPLES: &str = "\
Examples:
  fulmar verify --data /var/lib/fulmar        of a node that does not run, or of a backup
  fulmar verify --store s3://bucket/fulmar    of a store that no node uses, whose data directory is elsewhere
  fulmar verify --server postgres://fulmar@127.0.0.1:5433 --deep

Nothing is changed. Exit code 1 if there is damage; each place is listed.";

/// `fulmar verify`
#[derive(Args, Debug)]
#[command(after_help = VERIFY_EXAMPLES)]
pub struct VerifyArgs {
    /// Read this data directory, which no node uses, instead of asking a node
    #[arg(long, value_name = "DIR", conflicts_with = "deep")]
    pub data: Option<PathBuf>,
    /// Read this store, which no node uses, without its data directory: tenants are told by their numbers
    #[arg(long, value_name = "URL", conflicts_with_all = ["data", "deep"])]
    pub store: Option<StoreUrl>,
    /// Let SQLite check the structure of every tenant too (PRAGMA quick_check)
    #[arg(long)]
    pub deep: bool,
    /// The node to ask.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

const STATUS_EXAMPLES: &str = "\
Examples:
  fulmar status --http 127.0.0.1:8080
  fulmar status --json | jq '.metrics[].name'
  fulmar status --token-file /etc/fulmar/token        a token of `fulmar token create`; not with --insecure

Without a token a node that wants one shows its health, and no metrics.
Exit code 0 if the node is healthy, else 1.";

/// `fulmar status`
#[derive(Args, Debug)]
#[command(after_help = STATUS_EXAMPLES)]
pub struct StatusArgs {
    /// Where the node serves HTTP
    #[arg(long, env = "FULMAR_HTTP", default_value = "127.0.0.1:8080", value_name = "ADDR:PORT")]
    pub http: String,
    /// A file that holds a token for /metrics
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// `fulmar bench`
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// What to do.
    #[command(subcommand)]
    pub action: BenchAction,
}

/// What to measure.
#[derive(Debug, Subcommand)]
pub enum BenchAction {
    /// Run a workload against any server that speaks the Postgres protocol
    #[command(subcommand)]
    Run(Box<Workload>),
    /// Run cases against PostgreSQL and Fulmar in turns, on this machine
    #[command(subcommand)]
    Compare(Comparison),
    /// Make an HTML page, with charts and without anything from elsewhere, of a run's JSON lines
    Report(ReportArgs),
    /// Run the experiment of a paper's figure, scaled, against a node of its own; the rows come as CSV
    Figure(FigureArgs),
    /// Measure what the store costs and gives, on this machine
    #[command(after_help = BENCH_STORE_EXAMPLES)]
    Store(StoreArgs),
}

/// `fulmar bench report`
#[derive(Args, Debug)]
pub struct ReportArgs {
    /// What `fulmar bench run ... --output FILE` has written
    #[arg(value_name = "FILE.jsonl")]
    pub lines: PathBuf,
    /// Where the page goes
    #[arg(long, short, value_name = "FILE.html")]
    pub output: PathBuf,
}

const BENCH_STORE_EXAMPLES: &str = "\
Examples:
  fulmar bench store                              all cases
  fulmar bench store --case cold-s3-ms --rounds 9

Starts Fulmar nodes of its own, and an S3 server for the cases that need one: versitygw, which `make tools`
builds (or say where it is with --s3-server). docs/benchmarks.md tells how each case is made.";

const YCSB_EXAMPLES: &str = "\
Examples:
  fulmar tenant create shop                           the database must be there
  fulmar bench run ycsb --target postgres://fulmar@127.0.0.1:5433/shop
  fulmar bench run ycsb --target postgres://postgres@127.0.0.1:5432/postgres --connections 32
  fulmar bench run ycsb --target postgres://fulmar@127.0.0.1:5433/fulmar --tenants 100 --connections 1
  fulmar bench run ycsb --target postgres://fulmar@127.0.0.1:5433/shop --tables 1 --operations 1 --reads 85 \
      --distribution high-skew                                            E-Store's form
  fulmar bench run ycsb --target postgres://fulmar@127.0.0.1:5433/shop --reads 60 --sorts 10 --joins 10 --rate 50   ShuttleDB's mix
  fulmar bench run ycsb --target postgres://fulmar@127.0.0.1:5433/shop --rate 500 --arrival schedule \
      --trace world-cup --seconds 600 --output run.jsonl                  an open loop through a match day";

const VOTER_EXAMPLES: &str = "\
Examples:
  fulmar tenant create votes                          the database must be there
  fulmar bench run voter --target postgres://fulmar@127.0.0.1:5433/votes
  fulmar bench run voter --target postgres://fulmar@127.0.0.1:5433/votes --distribution high-skew:80:30 --procedure";

const TATP_EXAMPLES: &str = "\
Examples:
  fulmar tenant create register                       the database must be there
  fulmar bench run tatp --target postgres://fulmar@127.0.0.1:5433/register --subscribers 1000000";

const TPCC_EXAMPLES: &str = "\
Examples:
  fulmar tenant create shop                           the database must be there
  fulmar bench run tpcc --target postgres://fulmar@127.0.0.1:5433/shop --warehouses 10 --connections 16
  fulmar bench run tpcc --target postgres://postgres@127.0.0.1:5432/shop --warehouses 10 --procedure
  fulmar bench run tpcc --target postgres://fulmar@127.0.0.1:5433/shop --warehouses 100 \
      --distribution high-skew:60:3 --one-warehouse                       E-Store's high skew";

const TPCW_EXAMPLES: &str = "\
Examples:
  fulmar bench run tpcw --target postgres://fulmar@127.0.0.1:5433/shop
  fulmar bench run tpcw --target postgres://fulmar@127.0.0.1:5433/shop --connections 400 --pauses 1   browsers that wait";

/// A workload.
#[derive(Debug, Subcommand)]
pub enum Workload {
    /// YCSB as ElasTraS runs it: transactions of ten operations, nine reads and one update
    #[command(after_help = YCSB_EXAMPLES)]
    Ycsb(WorkloadArgs<Ycsb>),
    /// Voter: a telephone vote, many short transactions that insert
    #[command(after_help = VOTER_EXAMPLES)]
    Voter(WorkloadArgs<Voter>),
    /// TATP: a home location register, seven kinds of short transactions, 80 % of which read
    #[command(after_help = TATP_EXAMPLES)]
    Tatp(WorkloadArgs<Tatp>),
    /// TPC-C: orders, payments and deliveries of a wholesale supplier; its consistency is checked after the run
    #[command(after_help = TPCC_EXAMPLES)]
    Tpcc(WorkloadArgs<Tpcc>),
    /// TPC-W's shopping path: carts that are filled and bought; its consistency is checked after the run
    #[command(after_help = TPCW_EXAMPLES)]
    Tpcw(WorkloadArgs<Tpcw>),
}

/// The run of a workload.
#[derive(Args, Debug)]
pub struct WorkloadArgs<W: Args> {
    /// The workload's own arguments.
    #[command(flatten)]
    pub workload: W,
    /// Those that all workloads share.
    #[command(flatten)]
    pub run: RunArgs,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

const COMPARE_NODE_EXAMPLES: &str = "\
Examples:
  fulmar bench compare node                       all cases
  fulmar bench compare node --case read-8 --case proc-8 --seconds 10 --rounds 5
  fulmar bench compare node --before ./fulmar-0.1 what an update changes";

const COMPARE_TPCC_EXAMPLES: &str = "\
Examples:
  fulmar bench compare tpcc                       both cases
  fulmar bench compare tpcc --case tpcc-proc-16 --seconds 60";

const COMPARE_HOW: &str = "\
Starts a PostgreSQL of its own (Debian's postgresql-15, default durability) and a Fulmar node, each in a
temporary directory with equal memory, and runs each case against both in turns. docs/benchmarks.md tells how
each case is made. With --before the peer is another build of Fulmar instead of PostgreSQL.";

const CONSOLIDATION_EXAMPLES: &str = "\
Examples:
  fulmar bench compare consolidation              both cases
  fulmar bench compare consolidation --case noisy-neighbour --seconds 15";

const CONSOLIDATION_HOW: &str = "\
Starts Fulmar nodes of its own, with memory for all of their data, up to 7.5 GB. docs/benchmarks.md tells how
each case is made.";

/// The end of a comparison's help: examples, which cases there are, and how they are measured.
fn compare_help(examples: &str, suite: Suite, how: &str) -> String {
    let cases = cases(suite).map(|(name, what)| format!("  {name:20} {what}\n"));
    format!("{examples}\n\nCases:\n{}\n{how}", cases.collect::<String>())
}

/// A comparison.
#[derive(Debug, Subcommand)]
pub enum Comparison {
    /// One node against one PostgreSQL
    #[command(after_help = compare_help(COMPARE_NODE_EXAMPLES, Suite::Node, COMPARE_HOW))]
    Node(CompareArgs),
    /// TPC-C: statement by statement and as procedures
    #[command(after_help = compare_help(COMPARE_TPCC_EXAMPLES, Suite::Tpcc, COMPARE_HOW))]
    Tpcc(CompareArgs),
    /// Many tenants on one node: beside a loud one, and a hundred of them; Fulmar alone
    #[command(after_help = compare_help(CONSOLIDATION_EXAMPLES, Suite::Consolidation, CONSOLIDATION_HOW))]
    Consolidation(CompareArgs),
}

/// `fulmar demo`
#[derive(Args, Debug)]
#[command(
    after_help = "Needs PostgreSQL's pgbench: on Debian, apt-get install postgresql-15. Leaves nothing behind."
)]
pub struct DemoArgs {
    /// Seconds of load, half of them before the crash and half after
    #[arg(long, default_value_t = 40, value_name = "N", value_parser = clap::value_parser!(u64).range(4..=3600))]
    pub seconds: u64,
    /// Tenants, of which four run pgbench, one keeps a ledger, and the rest run YCSB
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(6..=5000))]
    pub tenants: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_flags_of_start_are_a_contract() {
        let line = "fulmar start --data d --sql 127.0.0.1:1 --http [::1]:2 --memory 256MB --tls-cert c --tls-key k \
                    --insecure";
        let Command::Start(start) = Cli::parse_from(line.split(' ').filter(|word| !word.is_empty())).command
        else {
            panic!("not start");
        };
        assert_eq!((start.memory, start.insecure, start.http.port()), (Some(Bytes(256 << 20)), true, 2));
        assert_eq!((start.slow_statement, start.max_statement_size), (1000, Bytes(1 << 20)));
        for size in ["63KiB", "17MiB", "x"] {
            let refused = Cli::try_parse_from(line.split_whitespace().chain(["--max-statement-size", size]));
            assert!(refused.is_err(), "{size}");
        }
        let refused =
            ["fulmar start --data d", "fulmar start --data d --sql 127.0.0.1:1 --http h:1 --tls-cert c"];
        for line in refused {
            assert!(Cli::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }

    #[test]
    fn global_flags_may_come_after_the_action() {
        let line = "fulmar tenant list --server postgres://a@b --json";
        let Command::Tenant(tenant) = Cli::parse_from(line.split(' ')).command else { panic!("not tenant") };
        assert!(tenant.json && tenant.server.server == "postgres://a@b");
    }
}
