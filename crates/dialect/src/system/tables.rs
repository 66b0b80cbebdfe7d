//! The list of all tables.

use fulmar_sqlite::SystemTable;

use super::asked::{Fill, Tables};
use super::{cluster, empty_tables, information, relations, types};

impl Tables {
    /// The tables of this crate, and the tables whose rows [`Viewer::rows`](super::Viewer::rows)
    /// produces.
    pub fn with(own: impl IntoIterator<Item = SystemTable>) -> Tables {
        let whole =
            [relations::TABLES, cluster::TABLES, types::TABLES, information::TABLES, empty_tables::TABLES]
                .concat();
        let by_group = [relations::BY_GROUP, information::BY_GROUP].concat();
        let whole = whole.into_iter().map(|(table, fill)| (table, Fill::Whole(fill)));
        let by_group =
            by_group.into_iter().map(|(table, columns, fill)| (table, Fill::ByGroup(columns, fill)));
        let own = own.into_iter().enumerate().map(|(index, table)| (table, Fill::Own(index)));
        let (tables, fills) = whole.chain(by_group).chain(own).unzip();
        Tables { tables, fills }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrowing_columns_exist() {
        for (table, columns, _) in [relations::BY_GROUP, information::BY_GROUP].concat() {
            for (column, _) in columns {
                let exists = table.columns.iter().any(|(name, _)| name == column);
                assert!(exists, "{} has no column {column}", table.name);
            }
        }
    }

    #[test]
    fn table_names_are_unique() {
        let mut names: Vec<&str> = Tables::with([]).names().collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
