//! The system catalog: the tables and functions of `pg_catalog` and `information_schema`.
//!
//! The engine provides these tables in each connection ([`fulmar_sqlite::System`]). [`Catalog`]
//! produces their rows for the querying session, which is a [`Viewer`]:
//!
//! | module | contents |
//! | --- | --- |
//! | `schema` | a tenant's tables, columns, indexes and constraints, read from SQLite's schema |
//! | `relations`, `constraints` | `pg_class`, `pg_attribute`, `pg_index`, `pg_constraint` ... |
//! | `cluster` | server-wide tables: `pg_database`, `pg_roles`, `pg_settings`, ... |
//! | `types` | `pg_type`, and names of types |
//! | `information` | `information_schema` |
//! | `empty_tables` | always empty: tables of unsupported features (policies, inheritance, ...) |
//! | `functions`, `arrays` | functions that clients call in catalog queries |
//!
//! The viewer adds its own tables, for example about sessions and statistics ([`Tables::with`]).
//!
//! Clients query the catalog in PostgreSQL's SQL, which this crate translates to SQLite's. The OID
//! of an object is derived from its rowid in `sqlite_schema` and can change with a VACUUM.

mod arrays;
mod asked;
mod catalog;
mod cells;
mod cluster;
mod constraints;
mod empty_tables;
mod functions;
mod information;
mod relations;
mod schema;
mod tables;
mod types;
mod viewer;

pub use asked::{Rows, Tables, table};
pub use catalog::Catalog;
pub use cells::Cell;
pub use cluster::{FIRST_USER_OID, oid, user_numbers};
pub(crate) use functions::is_function;
pub use relations::OWNER;
pub use viewer::{Action, Viewer};
