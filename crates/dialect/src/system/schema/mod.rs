//! Reads a tenant's schema from SQLite's `sqlite_schema` and pragmas.
//!
//! A schema can have thousands of tables with thousands of columns each. Only its [`Outline`] is in
//! memory as a whole: the names and OIDs of tables, views, indexes and triggers, about as much as
//! SQLite itself caches. Everything else is read in groups of tables, one [`Schema`] per group:
//!
//! ```text
//! Outline:  groups  [ a b c ][ d ][ v ][ e f ... ]    tables with up to 16 KiB of SQL in total, or
//!                                   |                 one larger table; each view is its own group
//!                                   `- Schema: columns, indexes, foreign keys, triggers, SQL texts
//! ```
//!
//! A typical schema is one group. It is read with one query per kind of object.

mod objects;
mod outline;
mod read;
mod values;

pub(crate) use objects::{ForeignKey, Index, Key, Relation, Schema, shown};
pub(crate) use outline::{CONSTRAINT_OID_BASE, Outline};
