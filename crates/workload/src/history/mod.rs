//! Checks that histories of list appends are serializable, after Elle (Kingsbury, Alvaro, 2020).
//!
//! Every transaction appends unique values to lists that all transactions read. A list therefore
//! shows the order of its writers, and a read shows which of them it saw. This gives the
//! dependencies between transactions:
//!
//! ```text
//!  final list of key 3:   7  4  9
//!                         |  |  `- T5 appended 9    T2 -ww-> T5    its value comes next
//!                         |  `---- T2 appended 4    T2 -wr-> T8    T8 read [7 4]: it saw T2 ...
//!                         `------- T1 appended 7    T8 -rw-> T5    ... and did not see T5
//! ```
//!
//! A transaction that was acknowledged before another one began also precedes it (`rt`), because
//! Fulmar guarantees strict serializability. A history is serializable exactly if these edges have
//! no cycle.

mod graph;

use std::collections::HashMap;
use std::fmt::Write;

use graph::Graph;

/// An operation of a transaction.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Read a list.
    Read {
        /// Which list.
        key: usize,
        /// Its values.
        list: Vec<u32>,
    },
    /// Appended a value, which no other transaction appends.
    Append {
        /// To which list.
        key: usize,
        /// The value.
        value: u32,
    },
    /// An append that was rolled back to a savepoint.
    Undone {
        /// To which list.
        key: usize,
        /// The value.
        value: u32,
    },
}

/// A transaction, as observed by its client.
#[derive(Clone, Debug)]
pub struct Transaction {
    /// The session, for reports.
    pub session: usize,
    /// How it began, for reports.
    pub kind: String,
    /// Time of a logical clock, shared by all sessions, before its first statement was sent.
    pub began: u64,
    /// Time of the logical clock after its last statement was answered. If the answer was lost and
    /// the final lists show that it committed: [`u64::MAX`].
    pub ended: u64,
    /// Whether it has committed.
    pub committed: bool,
    /// What it did, in order.
    pub events: Vec<Event>,
}

/// All transactions of a run, and the final lists, by key.
pub struct History {
    /// The transactions, in any order.
    pub transactions: Vec<Transaction>,
    /// The final lists.
    pub last: Vec<Vec<u32>>,
}

/// A description of why a history is not serializable.
pub type Anomaly = String;

impl History {
    /// Checks the history for strict serializability.
    pub fn check(&self) -> Result<(), Anomaly> {
        let writers = self.writers()?;
        self.check_last(&writers)?;
        for (at, transaction) in self.transactions.iter().enumerate() {
            self.check_reads(at, transaction, &writers)?;
        }
        match self.graph(&writers).cycle() {
            None => Ok(()),
            Some(cycle) => Err(format!("dependency cycle: {cycle}")),
        }
    }

    /// The transaction and key of each appended value, committed or not.
    fn writers(&self) -> Result<HashMap<u32, (usize, usize)>, Anomaly> {
        let mut writers = HashMap::new();
        for (at, transaction) in self.transactions.iter().enumerate() {
            for event in &transaction.events {
                if let Event::Append { key, value } = event
                    && writers.insert(*value, (at, *key)).is_some()
                {
                    return Err(format!("the test appended {value} twice"));
                }
            }
        }
        Ok(writers)
    }

    /// The final lists must contain each committed value exactly once, and nothing else.
    fn check_last(&self, writers: &HashMap<u32, (usize, usize)>) -> Result<(), Anomaly> {
        let mut found = HashMap::new();
        for (key, value) in
            self.last.iter().enumerate().flat_map(|(key, list)| list.iter().map(move |v| (key, v)))
        {
            if found.insert(*value, key).is_some() {
                return Err(format!("value {value} is duplicated"));
            }
            match writers.get(value) {
                Some((at, written)) if self.transactions[*at].committed && *written == key => {}
                Some((at, written)) => {
                    return Err(format!(
                        "T{at} wrote {value} to key {written}, but key {key} contains it, or T{at} did not commit"
                    ));
                }
                None => return Err(format!("key {key} contains {value}, which was rolled back")),
            }
        }
        match writers
            .iter()
            .find(|(value, (at, _))| self.transactions[*at].committed && !found.contains_key(value))
        {
            Some((value, (at, key))) => Err(format!("{value} in key {key}, committed by T{at}, is lost")),
            None => Ok(()),
        }
    }

    /// Every read must return a prefix of the final list, always the same one within a transaction,
    /// followed by the transaction's own appends. In a transaction that did not commit, this holds for
    /// the reads before its first append. Answers after it may be based on commits that are not durable
    /// yet, and are valid only if the transaction commits. If such commits were lost, their values are
    /// not where it has read them, but none of them had been answered when it began.
    fn check_reads(
        &self,
        at: usize,
        transaction: &Transaction,
        writers: &HashMap<u32, (usize, usize)>,
    ) -> Result<(), Anomaly> {
        let mut own_appends: HashMap<usize, Vec<u32>> = HashMap::new();
        let mut seen: HashMap<usize, &[u32]> = HashMap::new();
        for event in &transaction.events {
            match event {
                Event::Append { key, value } => own_appends.entry(*key).or_default().push(*value),
                Event::Undone { .. } => {}
                Event::Read { key, list } => {
                    let own = own_appends.get(key).map_or(&[][..], Vec::as_slice);
                    let Some(others) = list.strip_suffix(own) else {
                        return Err(format!(
                            "T{at} read {list:?} in key {key} without its own appends {own:?}"
                        ));
                    };
                    let whole = if transaction.committed { list } else { others };
                    let last = &self.last[*key];
                    let kept = whole.iter().zip(last).take_while(|(read, kept)| read == kept).count();
                    let is_provisional = !transaction.committed && !own_appends.is_empty();
                    let was_unanswered = |value: &u32| {
                        let writer = writers.get(value).map(|(writer, _)| &self.transactions[*writer]);
                        writer.is_some_and(|writer| writer.ended > transaction.began)
                    };
                    if kept < whole.len() && !(is_provisional && whole[kept..].iter().all(was_unanswered)) {
                        return Err(format!(
                            "T{at} read {list:?} in key {key}, but the final list is {last:?}"
                        ));
                    }
                    if let Some(before) = seen.insert(*key, others)
                        && before != others
                    {
                        return Err(format!("T{at} read {before:?} in key {key}, and later {others:?}"));
                    }
                }
            }
        }
        Ok(())
    }

    fn graph(&self, writers: &HashMap<u32, (usize, usize)>) -> Graph {
        let mut graph = Graph::new(self.transactions.len());
        let writer = |value: &u32| writers[value].0;
        for (key, list) in self.last.iter().enumerate() {
            for pair in list.windows(2) {
                graph.edge(writer(&pair[0]), writer(&pair[1]), format!("ww of key {key}"));
            }
        }
        let committed = || self.transactions.iter().enumerate().filter(|(_, t)| t.committed);
        for (at, transaction) in committed() {
            for event in &transaction.events {
                let Event::Read { key, list } = event else { continue };
                if let Some(value) = list.last() {
                    graph.edge(writer(value), at, format!("wr of key {key}"));
                }
                if let Some(value) = self.last[*key].get(list.len()) {
                    graph.edge(at, writer(value), format!("rw of key {key}"));
                }
            }
        }
        self.add_real_time(&mut graph);
        graph
    }

    /// Real-time edges. Instead of an edge for each pair of consecutive transactions, adds a chain
    /// of moments: each transaction leads to the moment of its end, each moment to the next one,
    /// and each transaction is preceded by the last moment before it began.
    fn add_real_time(&self, graph: &mut Graph) {
        let mut ticks: Vec<(u64, usize, bool)> = Vec::new();
        for (at, transaction) in self.transactions.iter().enumerate().filter(|(_, t)| t.committed) {
            ticks.push((transaction.began, at, true));
            ticks.push((transaction.ended, at, false));
        }
        ticks.sort_unstable();
        let mut moment = None;
        for (_, at, begins) in ticks {
            if begins {
                if let Some(moment) = moment {
                    graph.edge(moment, at, "rt".to_owned());
                }
                continue;
            }
            let next = graph.node();
            graph.edge(at, next, "rt".to_owned());
            if let Some(moment) = moment.replace(next) {
                graph.edge(moment, next, "rt".to_owned());
            }
        }
    }

    /// The complete history, for the report of a failed test.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for (at, t) in self.transactions.iter().enumerate() {
            let end = if t.committed { "committed" } else { "rejected or rolled back" };
            let _ = writeln!(text, "T{at} session {} {} [{}..{}] {end}", t.session, t.kind, t.began, t.ended);
            for event in &t.events {
                let _ = writeln!(text, "    {event:?}");
            }
        }
        for (key, list) in self.last.iter().enumerate() {
            let _ = writeln!(text, "key {key} at the end: {list:?}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::Event::{Append, Read};
    use super::*;

    fn history(transactions: Vec<(u64, u64, bool, Vec<Event>)>, last: Vec<Vec<u32>>) -> History {
        let transactions = transactions
            .into_iter()
            .map(|(began, ended, committed, events)| Transaction {
                session: 0,
                kind: String::new(),
                began,
                ended,
                committed,
                events,
            })
            .collect();
        History { transactions, last }
    }

    fn anomaly(history: History) -> String {
        history.check().expect_err("the check must find an anomaly")
    }

    #[test]
    fn serial_history_passes() {
        let one = vec![Append { key: 0, value: 1 }, Read { key: 0, list: vec![1] }];
        let two = vec![Read { key: 0, list: vec![1] }, Append { key: 0, value: 2 }];
        history(vec![(1, 2, true, one), (3, 4, true, two)], vec![vec![1, 2]]).check().unwrap();
    }

    #[test]
    fn write_skew_is_a_cycle() {
        let one = vec![Read { key: 0, list: vec![] }, Append { key: 1, value: 1 }];
        let two = vec![Read { key: 1, list: vec![] }, Append { key: 0, value: 2 }];
        let found = anomaly(history(vec![(1, 5, true, one), (2, 6, true, two)], vec![vec![2], vec![1]]));
        assert!(found.contains("rw of key 0") && found.contains("rw of key 1"), "{found}");
    }

    #[test]
    fn lost_update_is_detected() {
        let append = |value| vec![Read { key: 0, list: vec![] }, Append { key: 0, value }];
        let lost = history(vec![(1, 5, true, append(1)), (2, 6, true, append(2))], vec![vec![2]]);
        assert!(anomaly(lost).contains("is lost"));
        let overtaken = history(vec![(1, 5, true, append(1)), (2, 6, true, append(2))], vec![vec![1, 2]]);
        assert!(anomaly(overtaken).contains("cycle"));
    }

    #[test]
    fn stale_read_violates_real_time_order() {
        let write = vec![Append { key: 0, value: 1 }];
        let stale = vec![Read { key: 0, list: vec![] }];
        let at = |began| {
            history(vec![(1, 2, true, write.clone()), (began, 9, true, stale.clone())], vec![vec![1]])
        };
        assert!(anomaly(at(3)).contains("rt"));
        at(0).check().unwrap();
    }

    #[test]
    fn uncommitted_value_and_dirty_read_are_detected() {
        let write = || vec![Append { key: 0, value: 1 }];
        assert!(anomaly(history(vec![(1, 2, false, write())], vec![vec![1]])).contains("did not commit"));
        let read = vec![Read { key: 0, list: vec![1] }];
        let dirty = history(vec![(1, 4, false, write()), (2, 3, false, read)], vec![vec![]]);
        assert!(anomaly(dirty).contains("but the final list is"));
        // The answers of a transaction that has written are valid only if it commits.
        let after_append = || vec![Append { key: 1, value: 2 }, Read { key: 0, list: vec![1] }];
        let lists = |committed| if committed { vec![vec![], vec![2]] } else { vec![vec![], vec![]] };
        let rolled_back = vec![(1, 4, false, write()), (2, 3, false, after_append())];
        history(rolled_back, lists(false)).check().unwrap();
        let rolled_back_before = vec![(1, 2, false, write()), (3, 4, false, after_append())];
        assert!(anomaly(history(rolled_back_before, lists(false))).contains("but the final list is"));
        let committed = vec![(1, 4, false, write()), (2, 3, true, after_append())];
        assert!(anomaly(history(committed, lists(true))).contains("but the final list is"));
    }

    #[test]
    fn non_repeatable_read_is_detected() {
        let write = vec![Append { key: 0, value: 1 }];
        let reads = vec![Read { key: 0, list: vec![] }, Read { key: 0, list: vec![1] }];
        let moved = history(vec![(2, 3, true, write), (1, 4, false, reads)], vec![vec![1]]);
        assert!(anomaly(moved).contains("and later"));
    }
}
