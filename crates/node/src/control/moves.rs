//! Moves that were decided: a queue, and those that run.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use fulmar_cluster::election::RoleFence;
use fulmar_control::picture::Picture;
use fulmar_engine::{Error, sqlstate};
use fulmar_gateway::cluster::Move;
use fulmar_pages::PartitionId;
use futures::FutureExt;
use hashbrown::HashMap;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::decisions::{Part, Progress};
use crate::Node;

/// How long one move may take. It is then cancelled, if it is still copying.
const MOVE_TIMEOUT: Duration = Duration::from_secs(3600);

/// A move that was decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Queued {
    pub partition: PartitionId,
    pub to: String,
    pub decision: u64,
}

/// A move that runs, and its source.
struct Running {
    queued: Queued,
    from: String,
}

/// The number of moves that run from or to each node.
#[derive(Default)]
struct NodeLoads(HashMap<String, usize>);

impl NodeLoads {
    fn add(&mut self, running: &Running) {
        for node in [&running.from, &running.queued.to] {
            *self.0.entry_ref(node.as_str()).or_default() += 1;
        }
    }

    /// Returns true if less than `max` run from or to each of the move's nodes.
    fn allow(&self, next: &Running, max: usize) -> bool {
        [&next.from, &next.queued.to].into_iter().all(|node| self.0.get(node).is_none_or(|runs| *runs < max))
    }
}

/// The moves of this term.
#[derive(Default)]
pub(super) struct Moves {
    queue: VecDeque<Queued>,
    running: JoinSet<(Queued, Result<(), String>)>,
    in_flight: BTreeMap<PartitionId, Running>,
    /// How often the moves that ran were cancelled.
    cancelled: watch::Sender<u64>,
    /// When the last move of a partition failed, on the clock of the picture.
    failed_at_s: BTreeMap<PartitionId, f64>,
    /// When moves ended, on the same clock, and their nodes, until the loads show the effect.
    settling: Vec<(f64, [String; 2])>,
    /// When partitions were moved, on the same clock.
    pub moved_at_s: HashMap<PartitionId, f64>,
}

impl Moves {
    /// Adds moves to the end of the queue. They replace earlier ones of the same partitions.
    pub fn push(&mut self, moves: impl IntoIterator<Item = Queued>, progress: &mut Progress) {
        for next in moves {
            self.queue.retain(|queued| {
                if queued.partition == next.partition {
                    progress.give_up(
                        queued.decision,
                        &Part::Move(queued.partition),
                        "a later decision moves it",
                    );
                }
                queued.partition != next.partition
            });
            self.queue.push_back(next);
        }
    }

    /// The destinations of all moves that have not ended.
    pub fn arriving(&self) -> BTreeMap<PartitionId, String> {
        self.all().map(|queued| (queued.partition, queued.to.clone())).collect()
    }

    /// Forgets the moves that failed before this time.
    pub fn forget_failures(&mut self, before_s: f64) {
        self.failed_at_s.retain(|_, failed| *failed >= before_s);
    }

    /// The partitions whose last move has failed within this time.
    pub fn resting(&self, at_s: f64, for_s: f64) -> BTreeSet<PartitionId> {
        let failed = self.failed_at_s.iter().filter(|(_, failed)| at_s - **failed < for_s);
        failed.map(|(partition, _)| *partition).collect()
    }

    /// Returns true if moves to a node have not ended.
    pub fn involves(&self, node: &str) -> bool {
        self.all().any(|queued| queued.to == node)
    }

    /// The moves that have not ended.
    fn all(&self) -> impl Iterator<Item = &Queued> {
        self.queue.iter().chain(self.in_flight.values().map(|running| &running.queued))
    }

    /// Returns true if no move runs.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Gives up the moves that have not started, and returns them.
    pub fn clear(&mut self) -> Vec<Queued> {
        self.queue.drain(..).collect()
    }

    /// Cancels the moves that run.
    pub fn cancel(&mut self) {
        self.cancelled.send_modify(|times| *times += 1);
    }

    /// Gives up the moves that have not started and that an operator or the picture does not allow any
    /// more.
    pub fn check(&mut self, picture: &Picture, pinned: &BTreeSet<PartitionId>, progress: &mut Progress) {
        let open: BTreeSet<&str> =
            picture.nodes.iter().filter(|node| node.accepts_moves()).map(|node| node.name.as_str()).collect();
        self.queue.retain(|queued| {
            let problem = match (open.contains(queued.to.as_str()), pinned.contains(&queued.partition)) {
                (_, true) => "it was pinned".to_owned(),
                (false, false) => format!("node {} does not accept databases any more", queued.to),
                (true, false) => return true,
            };
            progress.end(queued.decision, &Part::Move(queued.partition), Err(problem));
            false
        });
    }

    /// Starts moves, of which at most `max` run from and to each node.
    pub fn start(&mut self, node: &Arc<Node>, fence: &RoleFence, max: usize, progress: &mut Progress) {
        let mut loads = NodeLoads::default();
        self.in_flight.values().for_each(|running| loads.add(running));
        for queued in std::mem::take(&mut self.queue) {
            let part = Part::Move(queued.partition);
            let Some(owner) = node.owners().owner(queued.partition) else {
                progress.end(queued.decision, &part, Err("it was dropped".to_owned()));
                continue;
            };
            let running = Running { from: node.name_of(owner.node), queued };
            if running.from == running.queued.to {
                progress.end(running.queued.decision, &part, Ok(()));
            } else if loads.allow(&running, max) && !self.in_flight.contains_key(&running.queued.partition) {
                loads.add(&running);
                self.spawn(node, fence, running);
            } else {
                self.queue.push_back(running.queued);
            }
        }
    }

    fn spawn(&mut self, node: &Arc<Node>, fence: &RoleFence, running: Running) {
        let queued = running.queued.clone();
        self.in_flight.insert(queued.partition, running);
        let (node, fence, cancelled) = (node.clone(), fence.clone(), self.cancelled.subscribe());
        self.running.spawn(async move {
            let moving = carry_out(&node, &queued, &fence, cancelled);
            let moving = AssertUnwindSafe(moving).catch_unwind().await;
            let moved = match moving {
                Ok(moved) => moved.map_err(|error| error.to_string()),
                Err(_) => Err("internal error: it has panicked".to_owned()),
            };
            (queued, moved)
        });
    }

    /// The nodes whose load is changing: those of moves that have not ended, or did less than `settle_s`
    /// ago. `home` is the node of a partition.
    pub fn changing(
        &mut self,
        at_s: f64,
        settle_s: f64,
        home: impl Fn(PartitionId) -> Option<String>,
    ) -> BTreeSet<String> {
        self.settling.retain(|(ended_s, _)| at_s - ended_s < settle_s);
        let settling = self.settling.iter().flat_map(|(_, nodes)| nodes.clone());
        let nodes = |queued: &Queued| home(queued.partition).into_iter().chain([queued.to.clone()]);
        settling.chain(self.all().flat_map(nodes)).collect()
    }

    /// Completes when a move has ended. Never, if none runs.
    pub async fn ended(&mut self) -> (Queued, Result<(), String>) {
        match self.running.join_next().await {
            Some(Ok(ended)) => ended,
            // The tasks catch panics, and end only with this object.
            Some(Err(_)) | None => std::future::pending().await,
        }
    }

    /// Records the end of a move.
    pub fn end(
        &mut self,
        (queued, result): (Queued, Result<(), String>),
        at_s: f64,
        progress: &mut Progress,
    ) {
        if let Some(running) = self.in_flight.remove(&queued.partition) {
            self.settling.push((at_s, [running.from, running.queued.to]));
        }
        match &result {
            Ok(()) => {
                self.failed_at_s.remove(&queued.partition);
                self.moved_at_s.insert(queued.partition, at_s)
            }
            Err(_) => self.failed_at_s.insert(queued.partition, at_s),
        };
        progress.end(queued.decision, &Part::Move(queued.partition), result);
    }
}

async fn carry_out(
    node: &Node,
    queued: &Queued,
    fence: &RoleFence,
    mut cancelled: watch::Receiver<u64>,
) -> Result<(), Error> {
    let partition = queued.partition;
    let moving = async {
        let request = node.request_migration(partition, &queued.to, Move::default(), Some(fence));
        let Some(number) = request.await? else { return Ok(()) };
        let ended = node.migration_ended(partition, number);
        tokio::pin!(ended);
        tokio::select! {
            ended = &mut ended => return ended,
            // Also if that was while the move was requested.
            Ok(()) = cancelled.changed() => {}
        }
        // It may be too late for that.
        let _ = node.cancel_migration(partition, None).await;
        ended.await
    };
    match timeout(MOVE_TIMEOUT, moving).await {
        Ok(ended) => ended,
        Err(_) => {
            let _ = node.cancel_migration(partition, None).await;
            let text = format!("the move took longer than {MOVE_TIMEOUT:?}");
            Err(Error::new(sqlstate::QUERY_CANCELED, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use fulmar_control::picture::Node;

    use super::*;

    fn queued(partition: u64, to: &str) -> Queued {
        Queued { partition: PartitionId(partition), to: to.to_owned(), decision: 1 }
    }

    #[test]
    fn moves_that_are_not_allowed_any_more_are_given_up() {
        let mut moves = Moves::default();
        let mut progress = Progress::default();
        progress.begin(1, [1, 2, 3, 4].map(|id| Part::Move(PartitionId(id))));
        moves.push([queued(1, "n1"), queued(2, "n2"), queued(3, "n3"), queued(4, "n1")], &mut progress);
        progress.begin(2, [Part::Move(PartitionId(1))]);
        moves.push([Queued { decision: 2, ..queued(1, "n2") }], &mut progress);
        assert_eq!([progress.remaining(1), progress.remaining(2)], [3, 1]);
        assert_eq!(moves.queue.len(), 4, "a later decision replaces an earlier one");
        let forbidden = Node { forbidden: true, ..Node::new("n3", 1.0) };
        let nodes = vec![Node::new("n1", 1.0), Node::new("n2", 1.0), forbidden];
        let picture = Picture { nodes, ..Picture::default() };
        moves.check(&picture, &BTreeSet::from([PartitionId(2)]), &mut progress);
        let left: Vec<u64> = moves.queue.iter().map(|queued| queued.partition.0).collect();
        assert_eq!(left, [4, 1]);
        assert!(moves.involves("n1") && moves.involves("n2") && !moves.involves("n3"));
        assert_eq!([progress.remaining(1), progress.remaining(2)], [1, 1]);
    }

    #[test]
    fn moves_are_limited_per_node() {
        let running = |partition, from: &str, to: &str| Running {
            queued: queued(partition, to),
            from: from.to_owned(),
        };
        let mut loads = NodeLoads::default();
        loads.add(&running(1, "n1", "n2"));
        loads.add(&running(2, "n1", "n3"));
        assert!(!loads.allow(&running(3, "n1", "n4"), 2), "two moves from n1 run");
        assert!(!loads.allow(&running(3, "n4", "n1"), 2), "moves to a node count as well");
        assert!(loads.allow(&running(3, "n2", "n3"), 2) && loads.allow(&running(3, "n4", "n5"), 2));
    }

    #[test]
    fn nodes_of_a_move_settle_when_it_has_ended() {
        let (mut moves, mut progress) = (Moves::default(), Progress::default());
        moves.push([queued(1, "n2"), queued(2, "n4")], &mut progress);
        let home = |partition: PartitionId| Some(format!("n{}", partition.0 * 2 - 1));
        assert_eq!(Vec::from_iter(moves.changing(0.0, 10.0, home)), ["n1", "n2", "n3", "n4"]);
        let next = moves.queue.pop_front().unwrap();
        moves.in_flight.insert(next.partition, Running { queued: next.clone(), from: "n1".to_owned() });
        moves.end((next, Ok(())), 5.0, &mut progress);
        assert_eq!(Vec::from_iter(moves.changing(14.0, 10.0, home)), ["n1", "n2", "n3", "n4"]);
        assert_eq!(Vec::from_iter(moves.changing(15.0, 10.0, home)), ["n3", "n4"]);
    }

    #[test]
    fn partitions_rest_after_a_failed_move() {
        let (mut moves, mut progress) = (Moves::default(), Progress::default());
        moves.end((queued(1, "n1"), Err("lost".to_owned())), 10.0, &mut progress);
        moves.end((queued(2, "n1"), Ok(())), 11.0, &mut progress);
        assert_eq!(moves.resting(15.0, 10.0), BTreeSet::from([PartitionId(1)]));
        assert_eq!(moves.resting(20.0, 10.0), BTreeSet::new());
        assert_eq!(moves.moved_at_s.get(&PartitionId(2)), Some(&11.0));
    }
}
