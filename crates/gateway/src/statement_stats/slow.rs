//! The newest slow statements of this node.
//!
//! A tenant whose statements are all slow does not displace those of others: each has a limit.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::SlowStatement;

/// Maximum number of statements.
const MAX_STATEMENTS: usize = 500;
/// Maximum number of statements of a tenant.
const MAX_OF_TENANT: usize = 50;

/// The newest slow statements.
#[derive(Default)]
pub(crate) struct SlowStatements(Mutex<VecDeque<SlowStatement>>);

impl SlowStatements {
    /// Adds a statement, and removes an old one if there are too many.
    pub(crate) fn add(&self, statement: SlowStatement) {
        let mut statements = self.0.lock();
        let of_tenant = |other: &SlowStatement| other.partition == statement.partition;
        let removed = if statements.iter().filter(|other| of_tenant(other)).count() >= MAX_OF_TENANT {
            statements.iter().position(of_tenant)
        } else {
            (statements.len() >= MAX_STATEMENTS).then_some(0)
        };
        if let Some(index) = removed {
            statements.remove(index);
        }
        statements.push_back(statement);
    }

    /// The statements of the partitions that `is_wanted` accepts, oldest first.
    pub(crate) fn list(&self, is_wanted: impl Fn(u64) -> bool) -> Vec<SlowStatement> {
        let statements = self.0.lock();
        statements.iter().filter(|statement| is_wanted(statement.partition)).cloned().collect()
    }

    /// Removes the statements of a partition.
    pub(crate) fn forget(&self, partition: u64) {
        self.0.lock().retain(|statement| statement.partition != partition);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_statements_are_removed_first_of_the_tenant() {
        let slow = SlowStatements::default();
        let add = |partition, number| {
            slow.add(SlowStatement { partition, at_unix_ms: number, ..SlowStatement::default() });
        };
        add(1, 0);
        (0..1000).for_each(|number| add(2, number));
        let of = |partition| slow.list(|other| other == partition);
        assert_eq!(of(1).len(), 1, "another tenant must not displace it");
        let times: Vec<u64> = of(2).iter().map(|statement| statement.at_unix_ms).collect();
        assert_eq!(times, (950..1000).collect::<Vec<u64>>());
        (3..103).for_each(|partition| (0..10).for_each(|number| add(partition, number)));
        assert_eq!(slow.list(|_| true).len(), MAX_STATEMENTS);
        assert_eq!((of(1).len(), of(2).len(), of(102).len()), (0, 0, 10));
        slow.forget(102);
        assert_eq!((of(102).len(), of(101).len()), (0, 10));
    }
}
