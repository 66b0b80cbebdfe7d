//! Histories of list appends, and the check that they are serializable, after Elle (Kingsbury, Alvaro, 2020).
//!
//! Every transaction appends values that nobody else appends to lists that everybody reads. A list therefore tells the
//! order of its writers, and a read tells what it had seen of them. From that follows who must come before whom:
//!
//! ```text
//!  final list of key 3:   7  4  9
//!                         |  |  `- T5 appended 9    T2 -ww-> T5    its value comes next
//!                         |  `---- T2 appended 4    T2 -wr-> T8    T8 read [7 4]: it saw T2 ...
//!                         `------- T1 appended 7    T8 -rw-> T5    ... and did not see T5
//! ```
//!
//! A transaction that was answered before another one began comes before it, too (`rt`): what Fulmar promises is strict.
//! A history is serializable exactly if these edges close no circle. Reads alone are checked for more: whatever a
//! transaction read, even one that was refused later, was there, and stayed as it was while the transaction lasted.

use std::collections::HashMap;
use std::fmt::Write;

use super::graph::Graph;

/// What a transaction did, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Read {
        key: usize,
        list: Vec<u32>,
    },
    Append {
        key: usize,
        value: u32,
    },
    /// Appended after a savepoint, and rolled back to it.
    Undone {
        key: usize,
        value: u32,
    },
}

/// One transaction, as its client saw it.
#[derive(Clone, Debug)]
pub struct Transaction {
    pub session: usize,
    /// How it began, for people.
    pub kind: String,
    /// A clock that all sessions share ticked thus before its first statement was sent ...
    pub began: u64,
    /// ... and thus after its last one was answered.
    pub ended: u64,
    pub committed: bool,
    pub events: Vec<Event>,
}

/// All transactions of a run, and the lists at its end, by key.
pub struct History {
    pub transactions: Vec<Transaction>,
    pub last: Vec<Vec<u32>>,
}

/// Why a history is not serializable, in words.
pub type Anomaly = String;

impl History {
    /// Looks for whatever no serial order can explain.
    pub fn check(&self) -> Result<(), Anomaly> {
        let writers = self.writers()?;
        self.check_last(&writers)?;
        for (at, transaction) in self.transactions.iter().enumerate() {
            self.check_reads(at, transaction)?;
        }
        match self.graph(&writers).circle() {
            None => Ok(()),
            Some(circle) => Err(format!("a circle: {circle}")),
        }
    }

    /// Who appended a value, whether it committed or not.
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

    /// The lists hold what was committed, once, and nothing else.
    fn check_last(&self, writers: &HashMap<u32, (usize, usize)>) -> Result<(), Anomaly> {
        let mut found = HashMap::new();
        for (key, value) in
            self.last.iter().enumerate().flat_map(|(key, list)| list.iter().map(move |v| (key, v)))
        {
            if found.insert(*value, key).is_some() {
                return Err(format!("{value} is there twice"));
            }
            match writers.get(value) {
                Some((at, written)) if self.transactions[*at].committed && *written == key => {}
                Some((at, written)) => {
                    return Err(format!(
                        "T{at} wrote {value} to key {written}, which is now in key {key}, committed or not"
                    ));
                }
                None => return Err(format!("{value} was rolled back, and is in the list of key {key}")),
            }
        }
        match writers
            .iter()
            .find(|(value, (at, _))| self.transactions[*at].committed && !found.contains_key(value))
        {
            Some((value, (at, key))) => {
                Err(format!("{value} in key {key}, of T{at}, which committed, is lost"))
            }
            None => Ok(()),
        }
    }

    /// A transaction read a prefix of what its keys became, always the same one, and behind it what it appended itself.
    fn check_reads(&self, at: usize, transaction: &Transaction) -> Result<(), Anomaly> {
        let mut own: HashMap<usize, Vec<u32>> = HashMap::new();
        let mut seen: HashMap<usize, &[u32]> = HashMap::new();
        for event in &transaction.events {
            match event {
                Event::Append { key, value } => own.entry(*key).or_default().push(*value),
                Event::Undone { .. } => {}
                Event::Read { key, list } => {
                    let own = own.get(key).map_or(&[][..], Vec::as_slice);
                    let Some(others) = list.strip_suffix(own) else {
                        return Err(format!("T{at} read {list:?} in key {key}, which lacks its own {own:?}"));
                    };
                    let whole = if transaction.committed { list } else { others };
                    if !self.last[*key].starts_with(whole) {
                        let last = &self.last[*key];
                        return Err(format!("T{at} read {list:?} in key {key}, which became {last:?}"));
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

    /// Instead of an edge for each pair of transactions one after the other, a chain of moments: each transaction leads to
    /// the moment of its end, each moment to the next, and the last moment before a transaction began to that one.
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

    /// The history in full, for a failed test.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for (at, t) in self.transactions.iter().enumerate() {
            let end = if t.committed { "committed" } else { "refused or rolled back" };
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
        history.check().expect_err("the check found nothing")
    }

    #[test]
    fn a_serial_history_passes() {
        let one = vec![Append { key: 0, value: 1 }, Read { key: 0, list: vec![1] }];
        let two = vec![Read { key: 0, list: vec![1] }, Append { key: 0, value: 2 }];
        history(vec![(1, 2, true, one), (3, 4, true, two)], vec![vec![1, 2]]).check().unwrap();
    }

    #[test]
    fn write_skew_is_a_circle() {
        let one = vec![Read { key: 0, list: vec![] }, Append { key: 1, value: 1 }];
        let two = vec![Read { key: 1, list: vec![] }, Append { key: 0, value: 2 }];
        let found = anomaly(history(vec![(1, 5, true, one), (2, 6, true, two)], vec![vec![2], vec![1]]));
        assert!(found.contains("rw of key 0") && found.contains("rw of key 1"), "{found}");
    }

    #[test]
    fn a_lost_update_is_found() {
        let append = |value| vec![Read { key: 0, list: vec![] }, Append { key: 0, value }];
        let lost = history(vec![(1, 5, true, append(1)), (2, 6, true, append(2))], vec![vec![2]]);
        assert!(anomaly(lost).contains("is lost"));
        let overtaken = history(vec![(1, 5, true, append(1)), (2, 6, true, append(2))], vec![vec![1, 2]]);
        assert!(anomaly(overtaken).contains("circle"));
    }

    #[test]
    fn a_stale_read_is_against_real_time() {
        let write = vec![Append { key: 0, value: 1 }];
        let stale = vec![Read { key: 0, list: vec![] }];
        let at = |began| {
            history(vec![(1, 2, true, write.clone()), (began, 9, true, stale.clone())], vec![vec![1]])
        };
        assert!(anomaly(at(3)).contains("rt"));
        at(0).check().unwrap();
    }

    #[test]
    fn what_was_not_committed_is_not_there() {
        let write = || vec![Append { key: 0, value: 1 }];
        assert!(anomaly(history(vec![(1, 2, false, write())], vec![vec![1]])).contains("committed or not"));
        let read = vec![Read { key: 0, list: vec![1] }];
        let dirty = history(vec![(1, 4, false, write()), (2, 3, false, read)], vec![vec![]]);
        assert!(anomaly(dirty).contains("which became"));
    }

    #[test]
    fn a_read_that_changes_is_found() {
        let write = vec![Append { key: 0, value: 1 }];
        let reads = vec![Read { key: 0, list: vec![] }, Read { key: 0, list: vec![1] }];
        let moved = history(vec![(2, 3, true, write), (1, 4, false, reads)], vec![vec![1]]);
        assert!(anomaly(moved).contains("and later"));
    }
}
