//! Arguments of `fulmar tenant`.

use std::path::PathBuf;

use clap::{ArgGroup, Args, Subcommand};

use super::ServerArgs;

const TENANT_EXAMPLES: &str = "\
Examples:
  fulmar tenant create shop --owner ada --server postgres://fulmar@127.0.0.1:5433
  fulmar tenant create shop-test --template shop      a copy of the current data of shop
  fulmar tenant history shop                          list the restore points of shop
  fulmar tenant create shop-noon --template shop --at '2026-11-21 12:00'
  fulmar tenant restore shop --to '2026-11-21 12:00'
  fulmar tenant rename shop store
  fulmar tenant list --json
  fulmar tenant load shop orders orders.csv --header
  fulmar tenant export shop shop.db                   a consistent SQLite file, while shop is in use
  fulmar tenant export shop noon.db --at '2026-11-21 12:00'
  fulmar tenant import shop-2 shop.db --owner ada
  fulmar tenant exec --all -f migrate.sql             one transaction in each tenant
  fulmar tenant drop store

To set the server once: export FULMAR_SERVER=postgres://fulmar@127.0.0.1:5433
The password is taken from --password-file, the URL or PGPASSWORD, in this order.
For TLS: --server 'postgres://fulmar@db.example:5433?sslmode=verify-full&sslrootcert=server.crt'

The same operations are available in SQL, in the database `fulmar`:
  CREATE DATABASE shop WITH OWNER ada;";

/// `fulmar tenant`
#[derive(Args, Debug)]
#[command(after_help = TENANT_EXAMPLES)]
pub struct TenantArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub action: TenantAction,
    /// The node to connect to.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Print the result as JSON
    #[arg(long, global = true)]
    pub json: bool,
}

/// A subcommand of `fulmar tenant`.
#[derive(Debug, Subcommand)]
pub enum TenantAction {
    /// Create tenants. Clients can connect to them immediately
    Create {
        /// Names of the new tenants
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        /// Owner of the tenants [default: the current user]
        #[arg(long, value_name = "USER")]
        owner: Option<String>,
        /// Copy this tenant instead of starting with an empty database
        #[arg(long, value_name = "TENANT")]
        template: Option<String>,
        /// Copy the template as it was at this time, in UTC: '2026-11-21 18:05:00'
        #[arg(long, value_name = "TIME", requires = "template")]
        at: Option<String>,
    },
    /// Drop tenants permanently, with all their data
    Drop {
        /// Names of the tenants
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Rename a tenant
    Rename {
        /// Current name
        from: String,
        /// New name
        to: String,
    },
    /// List all tenants
    List,
    /// List the restore points of a tenant
    History {
        /// Name of the tenant
        name: String,
    },
    /// Restore a tenant to a point in time. Closes its sessions
    Restore {
        /// Name of the tenant
        name: String,
        /// Restore the last version at or before this time, in UTC: '2026-11-21 18:05:00'
        #[arg(long, value_name = "TIME")]
        to: String,
    },
    /// Load a file into a table of a tenant: all of its rows, or none
    Load(LoadArgs),
    /// Export a tenant as an SQLite file, while it is in use
    Export(ExportArgs),
    /// Create a tenant from an SQLite file
    Import(ImportArgs),
    /// Run a script in many tenants, in one transaction per tenant
    #[command(after_help = EXEC_EXAMPLES)]
    Exec(ExecArgs),
}

/// `fulmar tenant load`
#[derive(Args, Debug)]
pub struct LoadArgs {
    /// Name of the tenant
    pub name: String,
    /// Name of the table. It must exist
    pub table: String,
    /// Input file; - is standard input. *.csv is read as CSV, other files in PostgreSQL's text
    /// format
    #[arg(default_value = "-")]
    pub file: PathBuf,
    /// Columns of the file, in its order [default: all columns of the table]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub columns: Vec<String>,
    /// Read the file as CSV, regardless of its name
    #[arg(long)]
    pub csv: bool,
    /// The first line contains the column names
    #[arg(long)]
    pub header: bool,
    /// Column separator [default: a comma for CSV, otherwise a tab]
    #[arg(long, value_name = "CHAR")]
    pub delimiter: Option<String>,
    /// Representation of NULL [default: an empty field for CSV, otherwise \N]
    #[arg(long, value_name = "TEXT")]
    pub null: Option<String>,
}

/// `fulmar tenant export`
#[derive(Args, Debug)]
pub struct ExportArgs {
    /// Name of the tenant
    pub name: String,
    /// Output file; - is standard output. It must not exist, except with --force
    pub file: PathBuf,
    /// Overwrite the file if it exists
    #[arg(long)]
    pub force: bool,
    /// Export the last version at or before this time, in UTC: '2026-11-21 18:05:00'
    #[arg(long, value_name = "TIME")]
    pub at: Option<String>,
}

/// `fulmar tenant import`
#[derive(Args, Debug)]
pub struct ImportArgs {
    /// Name of the new tenant
    pub name: String,
    /// SQLite database file with 4096-byte pages, in UTF-8; - is standard input
    pub file: PathBuf,
    /// Owner of the tenant [default: the current user]
    #[arg(long, value_name = "USER")]
    pub owner: Option<String>,
}

const EXEC_EXAMPLES: &str = "\
Examples:
  fulmar tenant exec --all -f migrate.sql
  fulmar tenant exec --like 'shop-%' -f migrate.sql --jobs 32
  fulmar tenant exec shop store -c 'UPDATE setting SET currency = 1'

Progress is recorded in migrate.sql.state. After Ctrl-C or a failure, run the same command again: it
skips the tenants in which the script has committed. A script whose text has changed, and the same
script on another server, count as new scripts.

Exit code 1 if the script failed in any tenant. Failed tenants are rolled back, except with
--no-transaction.";

/// `fulmar tenant exec`
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("tenants").required(true).multiple(false).args(["names", "all", "like"])))]
#[command(group(ArgGroup::new("text").required(true).multiple(false).args(["file", "command"])))]
pub struct ExecArgs {
    /// Names of the tenants
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// All tenants except the system database
    #[arg(long)]
    pub all: bool,
    /// Tenants with a name that matches this pattern, as in SQLite's LIKE
    #[arg(long, value_name = "PATTERN")]
    pub like: Option<String>,
    /// Script file. Query results are discarded
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Script text
    #[arg(short, long, value_name = "SQL")]
    pub command: Option<String>,
    /// Maximum number of tenants in which the script runs concurrently
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub jobs: u16,
    /// Run each statement in its own transaction, as VACUUM requires. Statements before an error
    /// stay committed
    #[arg(long)]
    pub no_transaction: bool,
    /// File that records progress [default: FILE.state with -f, none with -c]
    #[arg(long, value_name = "FILE")]
    pub state: Option<PathBuf>,
}
