//! Subcommands, flags and help texts of `fulmar`.

mod cert;
mod cluster;
mod control;
mod events;
mod load;
mod moves;
mod node;
mod plan;
mod security;
mod simulate;
mod tenant;
mod token;
mod top;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use fulmar_engine::{MAX_STATEMENT_BYTES, MIN_STATEMENT_BYTES};
use fulmar_store::StoreUrl;
use fulmar_workload::compare::{
    ClusterBenchArgs, CompareArgs, ControlBenchArgs, MigrateArgs, StoreArgs, Suite, cases,
};
use fulmar_workload::paper_figures::FigureArgs;
use fulmar_workload::run::RunArgs;
use fulmar_workload::tatp::Tatp;
use fulmar_workload::tpcc::Tpcc;
use fulmar_workload::tpcw::Tpcw;
use fulmar_workload::voter::Voter;
use fulmar_workload::ycsb::Ycsb;

use crate::size::Bytes;
pub use cert::{CertAction, CertArgs};
pub use cluster::{ClusterAction, ClusterArgs, ClusterCommandArgs, ConvertArgs, Join, MetaUrl};
pub use control::{ControlAction, ControlArgs, DecisionsArgs, ForecastArgs};
pub use events::EventsArgs;
pub use load::{LoadReportArgs, Switch};
pub use moves::{MoveArgs, MoveMechanism, MovesArgs};
pub use node::{NodeAction, NodeArgs, NodeMoveArgs};
pub use plan::PlanArgs;
pub use security::{MetaSecurityArgs, RpcTlsArgs};
pub use simulate::SimulateArgs;
pub use tenant::{ExecArgs, ExportArgs, ImportArgs, LoadArgs, TenantAction, TenantArgs};
pub use token::{TokenAction, TokenArgs};
pub use top::{Sort, TopArgs};

const EXAMPLES: &str = "\
Run the demo:
  fulmar demo                                   two minutes: three nodes, 100 tenants, a kill

Run a node on this machine, without passwords:
  fulmar start --data ./data --sql 127.0.0.1:5433 --http 127.0.0.1:8080 --insecure
  fulmar tenant create shop --server postgres://fulmar@127.0.0.1:5433
  psql postgres://fulmar@127.0.0.1:5433/shop

Fulmar speaks the PostgreSQL protocol and SQLite's SQL.";

/// Fulmar: thousands of small SQL databases in one process, over the PostgreSQL protocol.
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES, max_term_width = 100)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// A subcommand.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a node in the foreground
    Start(Box<StartArgs>),
    /// Create, drop, list and restore tenants; load, export and import data; run scripts
    Tenant(TenantArgs),
    /// List, drain and remove the nodes of a cluster
    Node(NodeArgs),
    /// Move a tenant to another node of the cluster, while it is in use
    Move(MoveArgs),
    /// Show what the newest moves of tenants have cost
    Moves(MovesArgs),
    /// Show and change what the cluster's controller may do: settings, pinned tenants, forbidden nodes
    Control(ControlArgs),
    /// Show what the controller has decided, why, and what came of it
    Decisions(DecisionsArgs),
    /// Show the loads that the controller has forecast, and what happened
    Forecast(ForecastArgs),
    /// Plan moves that balance a cluster, from a picture of it, and compare planners
    Plan(PlanArgs),
    /// Simulate policies that add and remove nodes on a load trace, and compare their cost
    Simulate(SimulateArgs),
    /// Move the metadata of a cluster
    Cluster(ClusterCommandArgs),
    /// Create, drop and list tokens for HTTP access
    Token(TokenArgs),
    /// Create certificates for TLS between the nodes of a cluster
    Cert(CertArgs),
    /// Show node events (--follow streams new ones)
    Events(EventsArgs),
    /// Verify the checksums of all stored data
    Verify(VerifyArgs),
    /// Show node status
    Status(StatusArgs),
    /// Show the busiest tenants and the longest-running statements
    Top(TopArgs),
    /// Run benchmarks, and compare Fulmar with PostgreSQL
    Bench(BenchArgs),
    /// Run a demo: three nodes, 100 tenants, the death of a node, and a load that grows
    Demo(DemoArgs),
}

const START_EXAMPLES: &str = "\
On this machine only, without passwords:
  fulmar start --data ./data --sql 127.0.0.1:5433 --http 127.0.0.1:8080 --insecure

For remote clients, with passwords and TLS:
  fulmar start --data /var/lib/fulmar --sql 0.0.0.0:5433 --http 127.0.0.1:8080 \\
      --memory 8GiB --tls-cert server.crt --tls-key server.key
  psql \"postgres://fulmar@db.example:5433/fulmar?sslmode=require\"

With the data in S3 or a compatible object store, and the log on the local disk:
  export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... AWS_REGION=eu-central-1
  export AWS_ENDPOINT_URL=https://s3.example           # unless it is Amazon S3
  fulmar start --data /var/lib/fulmar --store s3://bucket/fulmar --sql 0.0.0.0:5433 --http 127.0.0.1:8080

A read-only replica of that node, on any machine that can reach the store (see SET fulmar.staleness):
  fulmar start --read-only --store s3://bucket/fulmar --sql 0.0.0.0:5434 --http 127.0.0.1:8081

The first start without --insecure creates the superuser `fulmar` and writes its password to
DIR/superuser-password, which only the owner of that file can read.

A node that accepts connections prints one line on stdout: `fulmar ready: ...`. Logs go to stderr.
SIGINT and SIGTERM shut the node down. Running statements get 5 s to finish; a second signal stops
the node immediately.";

/// `fulmar start`
#[derive(Args, Debug)]
#[command(after_help = START_EXAMPLES)]
pub struct StartArgs {
    /// Data directory. Created if missing; locked while a node uses it
    #[arg(long, value_name = "DIR", required_unless_present = "read_only")]
    pub data: Option<PathBuf>,
    /// Run a read-only replica of the node that owns --store, or with --meta of a cluster. It has no
    /// data directory, and writes nothing to the store except garbage-collection holds. Large results
    /// are spilled to TMPDIR
    #[arg(long, requires = "store", conflicts_with = "data", group = "role")]
    pub read_only: bool,
    /// Store for segments, manifests and shared logs: file:///directory, s3://bucket/prefix, or
    /// memory: for tests. A data directory is bound to its store [default: DIR/store]
    #[arg(long, value_name = "URL")]
    pub store: Option<StoreUrl>,
    /// Accept the catalog at this revision, and lose all later changes to tenants, users and
    /// privileges. In a cluster: accept the metadata store at this generation. Use it only if the
    /// error message of a failed start says so
    #[arg(long, value_name = "REVISION", conflicts_with = "read_only")]
    pub accept_catalog: Option<u64>,
    /// Listen address for the PostgreSQL protocol
    #[arg(long, value_name = "ADDR:PORT")]
    pub sql: SocketAddr,
    /// Listen address for /healthz and /metrics. /metrics requires a token
    #[arg(long, value_name = "ADDR:PORT")]
    pub http: SocketAddr,
    /// Flags of a node of a cluster.
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Memory budget of the node, such as 256MB, 1GiB or a number of bytes. The page cache gets
    /// what remains after other uses, at least half [default: half of the machine's or container's
    /// memory]
    #[arg(long, value_name = "BYTES")]
    pub memory: Option<Bytes>,
    /// Flags of the load monitor.
    #[command(flatten)]
    pub load: LoadReportArgs,
    /// Free disk space to reserve. Writes are rejected below it. 0 disables the check [default:
    /// 1GiB, or 5 % of the disk if that is less]
    #[arg(long, value_name = "BYTES")]
    pub disk_reserve: Option<Bytes>,
    /// Disk space for caching data that was read from an S3 store, at least 64MB. 0 disables the
    /// cache [default: 0]
    #[arg(long, value_name = "BYTES", conflicts_with = "read_only")]
    pub disk_cache: Option<Bytes>,
    /// Address space of a statement's stack, at least 4MiB. A statement that needs more than 1/16
    /// of it fails with SQLSTATE 54001
    #[arg(long, value_name = "BYTES", default_value = "16MiB", hide = true)]
    pub statement_stack: Bytes,
    /// Maximum size of one SQL statement, 64KiB to 16MiB. A script of many statements may be larger
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = statement_size)]
    pub max_statement_size: Bytes,
    /// Certificate chain (PEM). Enables TLS. Reloaded when the file changes, and on SIGHUP
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Serve /metrics without a token. Use it only on an address that only your monitoring can
    /// reach
    #[arg(long)]
    pub public_metrics: bool,
    /// Disable authentication: every client is a superuser. Loopback addresses only
    #[arg(long)]
    pub insecure: bool,
    /// Log statements that take longer than this many milliseconds, without their literals. 0
    /// disables the slow statement log
    #[arg(long, default_value_t = 1000, value_name = "MS")]
    pub slow_statement: u64,
    /// Log format
    #[arg(long, value_enum, default_value_t = LogFormat::Text, value_name = "FORMAT")]
    pub log_format: LogFormat,
    /// Log filter: error, warn, info, debug, trace, or levels per crate as in
    /// fulmar_gateway=debug,info
    #[arg(long, env = "RUST_LOG", default_value = "info", value_name = "LEVEL")]
    pub log_level: String,
}

/// Parses `--max-statement-size` within the engine's bounds.
fn statement_size(text: &str) -> Result<Bytes, String> {
    let size: Bytes = text.parse()?;
    let (min, max) = (Bytes(MIN_STATEMENT_BYTES as u64), Bytes(MAX_STATEMENT_BYTES as u64));
    match (min..=max).contains(&size) {
        true => Ok(size),
        false => Err(format!("must be between {min} and {max}")),
    }
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Human-readable lines.
    Text,
    /// One JSON object per line.
    Json,
}

/// Default of `--server`: the default of `fulmar start --sql`.
pub const DEFAULT_SERVER: &str = "postgres://fulmar@127.0.0.1:5433";

/// The node to connect to, and the password.
#[derive(Args, Debug)]
pub struct ServerArgs {
    /// Node to connect to: postgres://USER:PASSWORD@HOST:PORT, with ?sslmode= and &sslrootcert= as
    /// in psql
    #[arg(long, global = true, env = "FULMAR_SERVER", value_name = "URL", hide_env_values = true)]
    #[arg(default_value = DEFAULT_SERVER)]
    pub server: String,
    /// File that contains the password
    #[arg(long, global = true, value_name = "FILE")]
    pub password_file: Option<PathBuf>,
}

const VERIFY_EXAMPLES: &str = "\
Examples:
  fulmar verify --data /var/lib/fulmar        the data directory of a stopped node, or a backup
  fulmar verify --store s3://bucket/fulmar    a store without its data directory
  fulmar verify --server postgres://fulmar@127.0.0.1:5433 --deep

Stored data is not modified. If any is damaged, each damaged place is listed and the exit code is 1.";

/// `fulmar verify`
#[derive(Args, Debug)]
#[command(after_help = VERIFY_EXAMPLES)]
pub struct VerifyArgs {
    /// Verify this data directory instead of a running node. No node may be using it
    #[arg(long, value_name = "DIR", conflicts_with = "deep")]
    pub data: Option<PathBuf>,
    /// Verify this store without its data directory. No node may be using it. Tenants are listed by
    /// partition id if the store has no readable catalog
    #[arg(long, value_name = "URL", conflicts_with_all = ["data", "deep"])]
    pub store: Option<StoreUrl>,
    /// Also run PRAGMA quick_check in every tenant
    #[arg(long)]
    pub deep: bool,
    /// The node to connect to.
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
  fulmar status --token-file /etc/fulmar/token        a token from `fulmar token create`

Without a token, only the health is shown, unless the node runs with --insecure or --public-metrics.
Exit code 0 if the node is healthy, otherwise 1.";

/// `fulmar status`
#[derive(Args, Debug)]
#[command(after_help = STATUS_EXAMPLES)]
pub struct StatusArgs {
    /// HTTP address of the node
    #[arg(long, env = "FULMAR_HTTP", default_value = "127.0.0.1:8080", value_name = "ADDR:PORT")]
    pub http: String,
    /// File that contains a token for /metrics
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// `fulmar bench`
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub action: BenchAction,
}

/// A subcommand of `fulmar bench`.
#[derive(Debug, Subcommand)]
pub enum BenchAction {
    /// Run a workload against any server that speaks the PostgreSQL protocol
    #[command(subcommand)]
    Run(Box<Workload>),
    /// Run benchmark cases against Fulmar and PostgreSQL alternately, on this machine
    #[command(subcommand)]
    Compare(Comparison),
    /// Render a run's JSON lines as a self-contained HTML report with charts
    Report(ReportArgs),
    /// Reproduce a figure of a paper at reduced scale, on servers of its own, and print CSV
    Figure(FigureArgs),
    /// Measure the overhead and the performance of the store, on this machine
    #[command(after_help = BENCH_STORE_EXAMPLES)]
    Store(StoreArgs),
    /// Measure a cluster of three nodes, with etcd and an S3 server, on this machine
    #[command(after_help = BENCH_CLUSTER_EXAMPLES)]
    Cluster(ClusterBenchArgs),
    /// Measure what elasticity costs, on this machine
    Control(ControlBenchArgs),
    /// Move a tenant between nodes under load, and measure what its clients notice
    Migrate(MigrateArgs),
}

/// `fulmar bench report`
#[derive(Args, Debug)]
pub struct ReportArgs {
    /// File written by `fulmar bench run ... --output FILE.jsonl`
    #[arg(value_name = "FILE.jsonl")]
    pub lines: PathBuf,
    /// HTML file to write
    #[arg(long, short, value_name = "FILE.html")]
    pub output: PathBuf,
}

const BENCH_STORE_EXAMPLES: &str = "\
Examples:
  fulmar bench store                              all cases
  fulmar bench store --case cold-s3-ms --rounds 9

Starts dedicated Fulmar nodes, and an S3 server for the cases that need one: versitygw, which
`make tools` builds (or set its path with --s3-server). docs/benchmarks.md describes each case.";

const BENCH_CLUSTER_EXAMPLES: &str = "\
Examples:
  fulmar bench cluster                                       all cases
  fulmar bench cluster --case failover-median-ms --kills 3   three kills

Starts three Fulmar nodes, etcd (Debian's etcd-server and etcd-client) and versitygw, which
`make tools` builds. docs/benchmarks.md describes each case.";

const YCSB_EXAMPLES: &str = "\
Examples:
  fulmar tenant create shop                           the database must exist
  fulmar bench run ycsb --target postgres://fulmar@127.0.0.1:5433/shop
  fulmar bench run ycsb --target postgres://postgres@127.0.0.1:5432/postgres --connections 32
  fulmar bench run ycsb --target postgres://fulmar@127.0.0.1:5433/fulmar --tenants 100 --connections 1
  fulmar bench run ycsb --target postgres://fulmar@127.0.0.1:5433/shop --tables 1 --operations 1 --reads 85 \
      --distribution high-skew                                            as in E-Store
  fulmar bench run ycsb --target postgres://fulmar@127.0.0.1:5433/shop --reads 60 --sorts 10 --joins 10 --rate 50   as in ShuttleDB
  fulmar bench run ycsb --target postgres://fulmar@127.0.0.1:5433/shop --rate 500 --arrival schedule \
      --trace world-cup --seconds 600 --output run.jsonl                  open loop over a match day";

const VOTER_EXAMPLES: &str = "\
Examples:
  fulmar tenant create votes                          the database must exist
  fulmar bench run voter --target postgres://fulmar@127.0.0.1:5433/votes
  fulmar bench run voter --target postgres://fulmar@127.0.0.1:5433/votes --distribution high-skew:80:30 --procedure";

const TATP_EXAMPLES: &str = "\
Examples:
  fulmar tenant create register                       the database must exist
  fulmar bench run tatp --target postgres://fulmar@127.0.0.1:5433/register --subscribers 1000000";

const TPCC_EXAMPLES: &str = "\
Examples:
  fulmar tenant create shop                           the database must exist
  fulmar bench run tpcc --target postgres://fulmar@127.0.0.1:5433/shop --warehouses 10 --connections 16
  fulmar bench run tpcc --target postgres://postgres@127.0.0.1:5432/shop --warehouses 10 --procedure
  fulmar bench run tpcc --target postgres://fulmar@127.0.0.1:5433/shop --warehouses 100 \
      --distribution high-skew:60:3 --one-warehouse                       E-Store's high skew";

const TPCW_EXAMPLES: &str = "\
Examples:
  fulmar bench run tpcw --target postgres://fulmar@127.0.0.1:5433/shop
  fulmar bench run tpcw --target postgres://fulmar@127.0.0.1:5433/shop --connections 400 --pauses 1   with think time";

/// A workload.
#[derive(Debug, Subcommand)]
pub enum Workload {
    /// YCSB as in ElasTraS: transactions of ten operations, nine reads and one update
    #[command(after_help = YCSB_EXAMPLES)]
    Ycsb(WorkloadArgs<Ycsb>),
    /// Voter: a telephone vote, with many short insert transactions
    #[command(after_help = VOTER_EXAMPLES)]
    Voter(WorkloadArgs<Voter>),
    /// TATP: a home location register, with seven types of short transactions, 80 % of them reads
    #[command(after_help = TATP_EXAMPLES)]
    Tatp(WorkloadArgs<Tatp>),
    /// TPC-C: orders, payments and deliveries of a wholesale supplier, checked for consistency
    /// after the run
    #[command(after_help = TPCC_EXAMPLES)]
    Tpcc(WorkloadArgs<Tpcc>),
    /// TPC-W's shopping path: carts are filled and bought, checked for consistency after the run
    #[command(after_help = TPCW_EXAMPLES)]
    Tpcw(WorkloadArgs<Tpcw>),
}

/// `fulmar bench run WORKLOAD`
#[derive(Args, Debug)]
pub struct WorkloadArgs<W: Args> {
    /// Arguments of this workload.
    #[command(flatten)]
    pub workload: W,
    /// Arguments common to all workloads.
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
  fulmar bench compare node --before ./fulmar-0.1 two builds of Fulmar";

const COMPARE_TPCC_EXAMPLES: &str = "\
Examples:
  fulmar bench compare tpcc                       both cases
  fulmar bench compare tpcc --case tpcc-proc-16 --seconds 60";

const COMPARE_METHOD: &str = "\
Starts a dedicated PostgreSQL server (Debian's postgresql-15, default durability) and a Fulmar node,
each in a temporary directory and with equal memory, and runs each case against both alternately.
With --before, the peer is another build of Fulmar instead of PostgreSQL. docs/benchmarks.md
describes each case.";

const CONSOLIDATION_EXAMPLES: &str = "\
Examples:
  fulmar bench compare consolidation              both cases
  fulmar bench compare consolidation --case noisy-neighbour --seconds 15";

const CONSOLIDATION_METHOD: &str = "\
Starts dedicated Fulmar nodes with memory for all of their data, up to 7.5 GB. docs/benchmarks.md
describes each case.";

/// The trailing help of a comparison: examples, the list of cases, and the method.
fn compare_help(examples: &str, suite: Suite, method: &str) -> String {
    let cases = cases(suite).map(|(name, description)| format!("  {name:20} {description}\n"));
    format!("{examples}\n\nCases:\n{}\n{method}", cases.collect::<String>())
}

/// A comparison.
#[derive(Debug, Subcommand)]
pub enum Comparison {
    /// One Fulmar node against one PostgreSQL server
    #[command(after_help = compare_help(COMPARE_NODE_EXAMPLES, Suite::Node, COMPARE_METHOD))]
    Node(CompareArgs),
    /// TPC-C, with individual statements and with procedures
    #[command(after_help = compare_help(COMPARE_TPCC_EXAMPLES, Suite::Tpcc, COMPARE_METHOD))]
    Tpcc(CompareArgs),
    /// Many tenants on one node: with a noisy neighbour, and with 100 tenants; Fulmar only
    #[command(after_help = compare_help(CONSOLIDATION_EXAMPLES, Suite::Consolidation, CONSOLIDATION_METHOD))]
    Consolidation(CompareArgs),
}

/// `fulmar demo`
#[derive(Args, Debug)]
#[command(
    after_help = "Requires pgbench and etcd (Debian: apt-get install postgresql-15 etcd-server etcd-client).
Removes all its files at the end."
)]
pub struct DemoArgs {
    /// Seconds of load, half before a node is killed and half after it
    #[arg(long, default_value_t = 40, value_name = "N", value_parser = clap::value_parser!(u64).range(4..=3600))]
    pub seconds: u64,
    /// Number of tenants: four run pgbench, one keeps a ledger, and the rest run YCSB
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(6..=5000))]
    pub tenants: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_definition_is_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn start_accepts_its_documented_flags_and_rejects_invalid_values() {
        let line = "fulmar start --data d --sql 127.0.0.1:1 --http [::1]:2 --memory 256MB --tls-cert c --tls-key k \
                    --insecure";
        let Command::Start(start) = Cli::parse_from(line.split(' ').filter(|word| !word.is_empty())).command
        else {
            panic!("parsed as another subcommand than start");
        };
        assert_eq!((start.memory, start.insecure, start.http.port()), (Some(Bytes(256 << 20)), true, 2));
        assert_eq!((start.slow_statement, start.max_statement_size), (1000, Bytes(1 << 20)));
        for size in ["63KiB", "17MiB", "x"] {
            let parsed = Cli::try_parse_from(line.split_whitespace().chain(["--max-statement-size", size]));
            assert!(parsed.is_err(), "accepted --max-statement-size {size}");
        }
        let invalid =
            ["fulmar start --data d", "fulmar start --data d --sql 127.0.0.1:1 --http h:1 --tls-cert c"];
        for line in invalid {
            assert!(Cli::try_parse_from(line.split(' ')).is_err(), "accepted: {line}");
        }
    }

    #[test]
    fn global_flags_are_accepted_after_the_action() {
        let line = "fulmar tenant list --server postgres://a@b --json";
        let Command::Tenant(tenant) = Cli::parse_from(line.split(' ')).command else {
            panic!("parsed as another subcommand than tenant");
        };
        assert!(tenant.json && tenant.server.server == "postgres://a@b");
    }
}
