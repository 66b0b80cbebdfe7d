//! Verification names every object that is damaged, truncated or missing, and no other.

use super::*;

/// Names of the damaged objects that a verification reports.
async fn reported_damage(store: &Backend) -> Vec<String> {
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

/// The reports if an object is damaged, truncated, or missing.
async fn reports_for(store: &Backend, name: &str) -> [Vec<String>; 3] {
    let bytes = store.get(name, Span::Whole).await.unwrap().bytes;
    let mut flipped = bytes.to_vec();
    flipped[bytes.len() / 2] ^= 1;
    let cut = bytes.slice(..bytes.len() / 2);
    let mut all = [const { Vec::new() }; 3];
    for (found, changed) in all.iter_mut().zip([Some(flipped.into()), Some(cut), None]) {
        store.delete(name).await.unwrap();
        if let Some(changed) = changed {
            store.put(name, changed).await.unwrap();
        }
        *found = reported_damage(store).await;
    }
    // The object does not exist if the last case was tested.
    let _ = store.delete(name).await;
    store.put(name, bytes).await.unwrap();
    all
}

#[tokio::test(start_paused = true)]
async fn every_damaged_object_is_reported() {
    let store = Backend::memory();
    for start in 0..3 {
        let (log, _) = open(&store).await;
        for transaction in 0..3 {
            append_durably(&log, 10 * start + transaction).await;
        }
    }
    let all = names(&store).await;
    // Each log has a claim, three batches and a seal, except the last one. The first claim is not
    // needed.
    let needed = slot(1, 1);
    assert_eq!(all.iter().filter(|name| **name >= needed).count(), 4 + 5 + 4, "{all:?}");
    assert_eq!(reported_damage(&store).await, [""; 0]);
    for name in &all {
        let [flipped, cut, missing] = reports_for(&store, name).await;
        assert_eq!((&flipped, &cut), (&vec![name.clone()], &vec![name.clone()]));
        // The loss of the very last object cannot be detected.
        let leaves_no_trace = Some(name) == all.last() || *name < needed;
        let expected = if leaves_no_trace { vec![] } else { vec![name.clone()] };
        assert_eq!(missing, expected, "{name}");
    }
    assert_eq!(reported_damage(&store).await, [""; 0]);
}

/// Of ended logs, only the objects that end them remain, which no start reads.
#[tokio::test(start_paused = true)]
async fn damaged_ends_of_old_logs_are_reported() {
    let store = Backend::memory();
    three_logs(&store).await;
    let (_log, _) = open(&store).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let all = names(&store).await;
    let (first, last) = (slot(1, 4), slot(4, 0));
    assert_eq!((all.first(), all.last()), (Some(&first), Some(&last)));
    assert_eq!(reported_damage(&store).await, [""; 0]);
    for name in &all {
        let [flipped, cut, missing] = reports_for(&store, name).await;
        assert_eq!((&flipped, &cut), (&vec![name.clone()], &vec![name.clone()]));
        let expected = match name {
            name if *name == last => vec![],
            // The name of the missing object is not known any more.
            name if *name < slot(3, 0) => vec![name.rsplit_once('/').unwrap().0.to_owned()],
            name => vec![name.clone()],
        };
        assert_eq!(missing, expected, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn nodes_that_have_logs_are_listed() {
    let store = Backend::memory();
    let reliable = || Reliable::new(store.share(), Limits::default());
    assert!(CommitLog::nodes_in(&reliable()).await.unwrap().is_empty());
    let (_log, _) = open(&store).await;
    store.put("logs/other/0000000000000001", Bytes::from_static(b"?")).await.unwrap();
    assert_eq!(CommitLog::nodes_in(&reliable()).await.unwrap().into_iter().collect::<Vec<_>>(), [NODE]);
}
