//! Questions about `pg_catalog`, answered from the catalog of tenants and from SQLite's schema.
//!
//! There is no `pg_catalog`: psql's `\l`, `\d`, `\dt`, `\d table`, `\du` and pgbench's start ask fixed questions about
//! it, and these are recognised by their shape rather than run as SQL:
//!
//! ```text
//! SELECT n.nspname as "Schema", c.relname as "Name", ... FROM pg_catalog.pg_class c LEFT JOIN ...
//!        `- items: which columns, by the names that the answer gives them    `- which relation
//! WHERE c.relkind IN ('r','p','') AND c.relname OPERATOR(pg_catalog.~) '^(t.*)$' AND ...
//!       `- filters: each condition must be of a known form
//! ```
//!
//! A relation here is a list of named columns that Rust fills. An item whose name the relation does not have is NULL,
//! which is how psql shows what does not apply; a condition or function that is not understood is an error, since a
//! wrong answer would be worse than none.

mod filter;
mod query;
mod relations;
mod schema;

pub(crate) use query::{CatalogQuery, recognise};
pub(crate) use relations::{Viewer, answer};
