//! The outline of a schema: names and OIDs of its objects, and the groups in which they are read.

use std::collections::HashMap;
use std::ops::Range;

use fulmar_sqlite::Database;

use super::values::{number, text_of_ref};
use crate::Result;

/// The OID of an object is its rowid in `sqlite_schema` plus this. PostgreSQL's user objects start
/// at the same OID.
pub(super) const FIRST_OID: i64 = 16_384;
/// OID ranges of objects that are not in `sqlite_schema`. Primary keys without an index: the
/// table's OID plus this.
pub(crate) const KEY_OID_BASE: i64 = 0x2000_0000;
/// PRIMARY KEY and UNIQUE constraints: the index's OID plus this.
pub(crate) const CONSTRAINT_OID_BASE: i64 = 0x4000_0000;
/// CHECK constraints and foreign keys; see
/// [`Relation::constraint_oid`](super::objects::Relation::constraint_oid).
pub(super) const OTHER_CONSTRAINT_OIDS: i64 = 0x6100_0000;
/// OIDs reserved per table for CHECK constraints, and the same number for foreign keys. The OIDs of
/// further constraints would collide with those of the next table.
pub(super) const CONSTRAINTS_PER_KIND: i64 = 2000;

/// Maximum total size of the SQL texts of a group's tables, unless the group is a single table. The
/// text size bounds the number of columns, and thereby the number of rows of a group.
const MAX_GROUP_BYTES: i64 = 16 << 10;

/// The names and OIDs of all objects.
#[derive(Default)]
pub(crate) struct Outline {
    /// Tables and views, sorted by name.
    relations: Vec<Head>,
    /// Indexes and triggers, sorted by their relation.
    owned: Vec<Owned>,
    /// Ranges of indexes in `relations`.
    groups: Vec<Range<usize>>,
    /// Indexes in `relations` by the OID of a relation, index or trigger.
    by_oid: HashMap<i64, usize>,
}

/// A table or view in the outline.
struct Head {
    oid: i64,
    name: String,
    is_view: bool,
    group: usize,
}

/// An index or trigger in the outline.
struct Owned {
    /// The index of its table or view in `relations`.
    relation: usize,
    oid: i64,
    name: String,
    is_index: bool,
}

impl Outline {
    /// Reads the outline.
    pub(crate) fn read(database: &Database<'_>) -> Result<Outline> {
        let mut outline = Outline::default();
        let mut bytes = 0;
        let sql = "SELECT rowid, name, type = 'view', octet_length(sql) FROM sqlite_schema \
                   WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite~_%' ESCAPE '~' ORDER BY name";
        database.each(sql, &[], |row| {
            let [rowid, name, is_view, length] = row else { return };
            outline.add(
                FIRST_OID + number(*rowid),
                text_of_ref(*name),
                number(*is_view) != 0,
                number(*length),
                &mut bytes,
            );
        })?;
        let sql = "SELECT rowid, name, tbl_name, type = 'index' FROM sqlite_schema WHERE type IN ('index', 'trigger')";
        database.each(sql, &[], |row| {
            let [rowid, name, table, is_index] = row else { return };
            let Some(relation) = outline.index_of(&text_of_ref(*table)) else { return };
            let oid = FIRST_OID + number(*rowid);
            outline.by_oid.insert(oid, relation);
            let (name, is_index) = (text_of_ref(*name), number(*is_index) != 0);
            outline.owned.push(Owned { relation, oid, name, is_index });
        })?;
        outline.owned.sort_by_key(|owned| owned.relation);
        Ok(outline)
    }

    /// Adds a relation. Relations must be added in the order of their names. `bytes` is the text
    /// size of the last group.
    fn add(&mut self, oid: i64, name: String, is_view: bool, length: i64, bytes: &mut i64) {
        let at = self.relations.len();
        let joins = self.relations.last().is_some_and(|last| !last.is_view && !is_view)
            && *bytes + length <= MAX_GROUP_BYTES;
        match self.groups.last_mut().filter(|_| joins) {
            Some(group) => {
                group.end = at + 1;
                *bytes += length;
            }
            None => {
                self.groups.push(at..at + 1);
                *bytes = length;
            }
        }
        self.by_oid.insert(oid, at);
        self.relations.push(Head { oid, name, is_view, group: self.groups.len() - 1 });
    }

    /// The index of a relation in `relations`. Names are compared case-insensitively.
    fn index_of(&self, name: &str) -> Option<usize> {
        let exact = self.relations.binary_search_by(|relation| relation.name.as_str().cmp(name));
        exact
            .ok()
            .or_else(|| self.relations.iter().position(|relation| relation.name.eq_ignore_ascii_case(name)))
    }

    /// The number of groups.
    pub(crate) fn groups(&self) -> usize {
        self.groups.len()
    }

    /// The group of the relation or index with this name.
    pub(crate) fn group_of_name(&self, name: &str) -> Option<usize> {
        let owner = || {
            let named =
                self.owned.iter().find(|owned| owned.is_index && owned.name.eq_ignore_ascii_case(name));
            named.map(|owned| owned.relation)
        };
        // The name of a primary key without an index.
        let keyed = || name.strip_suffix(KEY_SUFFIX).and_then(|table| self.index_of(table));
        let relation = self.index_of(name).or_else(owner).or_else(keyed)?;
        Some(self.relations[relation].group)
    }

    /// The group of the relation, index, trigger or constraint with this OID.
    pub(crate) fn group_of_oid(&self, oid: i64) -> Option<usize> {
        let object = match oid {
            OTHER_CONSTRAINT_OIDS.. => FIRST_OID + (oid - OTHER_CONSTRAINT_OIDS) / (2 * CONSTRAINTS_PER_KIND),
            CONSTRAINT_OID_BASE.. => oid - CONSTRAINT_OID_BASE,
            oid => oid,
        };
        let object = if object >= KEY_OID_BASE { object - KEY_OID_BASE } else { object };
        self.by_oid.get(&object).map(|relation| self.relations[*relation].group)
    }

    /// The OID of a relation or index.
    pub(crate) fn oid_of(&self, name: &str) -> Option<i64> {
        let index = || {
            let named = |owned: &&Owned| owned.is_index && owned.name.eq_ignore_ascii_case(name);
            self.owned.iter().find(named).map(|owned| owned.oid)
        };
        self.index_of(name).map(|relation| self.relations[relation].oid).or_else(index)
    }

    /// The name of a relation or index.
    pub(crate) fn name_of(&self, oid: i64) -> Option<&str> {
        let relation = *self.by_oid.get(&oid)?;
        let head = &self.relations[relation];
        if head.oid == oid {
            return Some(&head.name);
        }
        let index =
            self.owned_by(relation..relation + 1).iter().find(|owned| owned.oid == oid && owned.is_index);
        index.map(|index| index.name.as_str())
    }

    /// The indexes and triggers of these relations.
    fn owned_by(&self, relations: Range<usize>) -> &[Owned] {
        let start = self.owned.partition_point(|owned| owned.relation < relations.start);
        let end = self.owned.partition_point(|owned| owned.relation < relations.end);
        &self.owned[start..end]
    }

    /// The rowids in `sqlite_schema` of a group's objects, as a JSON array.
    pub(super) fn rowids(&self, group: usize) -> String {
        let relations = self.groups[group].clone();
        let own = self.relations[relations.clone()].iter().map(|relation| relation.oid);
        let oids = own.chain(self.owned_by(relations).iter().map(|owned| owned.oid));
        let rowids: Vec<String> = oids.map(|oid| (oid - FIRST_OID).to_string()).collect();
        format!("[{}]", rowids.join(","))
    }
}

/// The name suffix of primary keys without an index.
pub(super) const KEY_SUFFIX: &str = "_pkey";

#[cfg(test)]
mod tests {
    use super::super::objects::Relation;
    use super::*;

    #[test]
    fn outline_groups_tables_up_to_the_size_limit() {
        let mut outline = Outline::default();
        let mut bytes = 0;
        let relations =
            [("a", false, 8 << 10), ("b", false, 8 << 10), ("c", false, 1), ("d", true, 1), ("e", false, 1)];
        for (oid, (name, is_view, length)) in (FIRST_OID + 1..).zip(relations) {
            outline.add(oid, name.into(), is_view, length, &mut bytes);
        }
        outline.owned.push(Owned { relation: 1, oid: FIRST_OID + 9, name: "b_i".into(), is_index: true });
        outline.by_oid.insert(FIRST_OID + 9, 1);
        assert_eq!(outline.groups, [0..2, 2..3, 3..4, 4..5]);
        assert_eq!(outline.rowids(0), "[1,2,9]");
        assert_eq!(outline.rowids(3), "[5]");
        let names = ["B", "b_i", "c_pkey", "nothing"].map(|name| outline.group_of_name(name));
        assert_eq!(names, [Some(0), Some(0), Some(1), None]);
        let c = Relation {
            oid: FIRST_OID + 3,
            name: "c".into(),
            is_view: false,
            sql: "".into(),
            columns: vec![],
        };
        let oids = [
            FIRST_OID + 9,
            FIRST_OID + 9 + CONSTRAINT_OID_BASE,
            c.oid + KEY_OID_BASE,
            c.oid + KEY_OID_BASE + CONSTRAINT_OID_BASE,
            c.constraint_oid(0),
            c.constraint_oid(2 * CONSTRAINTS_PER_KIND - 1),
            FIRST_OID,
        ];
        let groups = oids.map(|oid| outline.group_of_oid(oid));
        assert_eq!(groups, [Some(0), Some(0), Some(1), Some(1), Some(1), Some(1), None]);
        assert_eq!(outline.name_of(FIRST_OID + 9), Some("b_i"));
        assert_eq!([outline.oid_of("C"), outline.oid_of("b_i")], [Some(c.oid), Some(FIRST_OID + 9)]);
    }
}
