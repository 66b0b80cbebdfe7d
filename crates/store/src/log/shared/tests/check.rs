//! Each object of a node's logs damaged, cut off or missing, one at a time: every one is named, and nothing else.

use super::*;

/// What is told, by names.
async fn told(store: &Backend) -> Vec<String> {
    let mut replay = |_, _: &Record<'_>| Ok(());
    let reliable = Reliable::new(store.share(), Limits::default());
    let found = CommitLog::verify_shared(reliable, NODE, &mut replay).await.unwrap();
    assert_eq!(found.objects, names(store).await.len() as u64);
    let name = |error| match error {
        LogError::Corrupt { file, .. } => file.strip_prefix(&format!("{store}/")).unwrap().to_owned(),
        other => panic!("{other}"),
    };
    found.damage.into_iter().map(name).collect()
}

/// What is told when an object is not what it was, and when it is not there.
async fn told_of(store: &Backend, name: &str) -> [Vec<String>; 3] {
    let bytes = store.get(name, Span::Whole).await.unwrap().bytes;
    let mut flipped = bytes.to_vec();
    flipped[bytes.len() / 2] ^= 1;
    let cut = bytes.slice(..bytes.len() / 2);
    let mut all = [const { Vec::new() }; 3];
    for (found, harmed) in all.iter_mut().zip([Some(flipped.into()), Some(cut), None]) {
        store.delete(name).await.unwrap();
        if let Some(harmed) = harmed {
            store.put(name, harmed).await.unwrap();
        }
        *found = told(store).await;
    }
    // One that was missing is there again.
    let _ = store.delete(name).await;
    store.put(name, bytes).await.unwrap();
    all
}

#[tokio::test(start_paused = true)]
async fn every_object_is_named() {
    let store = Backend::memory();
    for start in 0..3 {
        let (log, _) = open(&store).await;
        for transaction in 0..3 {
            append_durably(&log, 10 * start + transaction).await;
        }
    }
    let all = names(&store).await;
    // Each has a claim, three batches and a seal, but for the last one. The first claim nobody has ever needed.
    let needed = slot(1, 1);
    assert_eq!(all.iter().filter(|name| **name >= needed).count(), 4 + 5 + 4, "{all:?}");
    assert_eq!(told(&store).await, [""; 0]);
    for name in &all {
        let [flipped, cut, missing] = told_of(&store, name).await;
        assert_eq!((&flipped, &cut), (&vec![name.clone()], &vec![name.clone()]));
        // The last one of all has no witness.
        let leaves_no_trace = Some(name) == all.last() || *name < needed;
        let expected = if leaves_no_trace { vec![] } else { vec![name.clone()] };
        assert_eq!(missing, expected, "{name}");
    }
    assert_eq!(told(&store).await, [""; 0]);
}

/// Of logs that are over only their ends are left, which no start reads.
#[tokio::test(start_paused = true)]
async fn ends_of_logs_that_are_over_are_looked_at_too() {
    let store = Backend::memory();
    three_logs(&store).await;
    let (_log, _) = open(&store).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let all = names(&store).await;
    let (first, last) = (slot(1, 4), slot(4, 0));
    assert_eq!((all.first(), all.last()), (Some(&first), Some(&last)));
    assert_eq!(told(&store).await, [""; 0]);
    for name in &all {
        let [flipped, cut, missing] = told_of(&store, name).await;
        assert_eq!((&flipped, &cut), (&vec![name.clone()], &vec![name.clone()]));
        let expected = match name {
            name if *name == last => vec![],
            // Which one it was nobody knows any more.
            name if *name < slot(3, 0) => vec![name.rsplit_once('/').unwrap().0.to_owned()],
            name => vec![name.clone()],
        };
        assert_eq!(missing, expected, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_nodes_that_have_logs_are_found() {
    let store = Backend::memory();
    let reliable = || Reliable::new(store.share(), Limits::default());
    assert!(CommitLog::nodes_in(&reliable()).await.unwrap().is_empty());
    let (_log, _) = open(&store).await;
    store.put("logs/other/0000000000000001", Bytes::from_static(b"?")).await.unwrap();
    assert_eq!(CommitLog::nodes_in(&reliable()).await.unwrap().into_iter().collect::<Vec<_>>(), [NODE]);
}
