//! Exports: a node holds the objects of an older manifest and reads them slowly.

use std::time::Duration;

use fulmar_cluster::collection::ObjectName;
use fulmar_cluster::environment::Environment;
use fulmar_cluster::hold;
use fulmar_pages::PartitionId;

use super::open::read_segment;
use super::{Node, Report};
use crate::run::common_partitions;
use crate::violation::Kind;
use crate::world::Manifest;

impl Node {
    pub(super) async fn export(self) {
        let partitions = common_partitions();
        loop {
            self.pause(Duration::from_millis(300), Duration::from_millis(3000)).await;
            let partition = partitions[self.simulation().below(partitions.len() as u64) as usize];
            let Ok(manifests) = self.env.manifests(partition).await else { continue };
            let manifests: Vec<_> =
                manifests.into_iter().filter(|manifest| !manifest.segments.is_empty()).collect();
            if !manifests.is_empty() {
                // Most often the oldest one.
                let place = match self.simulation().chance(1, 2) {
                    true => 0,
                    false => self.simulation().below(manifests.len() as u64) as usize,
                };
                self.export_one(partition, &manifests[place]).await;
            }
        }
    }

    async fn export_one(&self, partition: PartitionId, manifest: &Manifest) {
        let segments = manifest.segments.iter().map(|segment| ObjectName::Segment(*segment));
        let objects: Vec<_> =
            [ObjectName::Manifest(partition, manifest.name)].into_iter().chain(segments).collect();
        let (begun, number) = {
            let mut shared = self.shared.lock();
            (shared.begun.clone(), shared.number())
        };
        let held = hold::hold(&self.env, (self.id, &begun.read), number, &objects).await;
        let hold = match held {
            Ok(Some(hold)) => hold,
            Ok(None) => return,
            Err(error) => return self.fenced(&error.to_string()),
        };
        for name in &manifest.segments {
            self.env.sleep(self.env.jitter(Duration::from_millis(1500))).await;
            if read_segment(&self.env, *name).await.is_none() {
                return self.report_missing(&format!("{name:?}")).await;
            }
        }
        self.env.sleep(self.env.jitter(Duration::from_millis(1500))).await;
        let listed = loop {
            if let Ok(listed) = self.env.manifests(partition).await {
                break listed;
            }
        };
        if !listed.iter().any(|listed| listed.name == manifest.name) {
            return self.report_missing(&format!("{:?}", manifest.name)).await;
        }
        hold::release(&self.env, hold).await;
        (self.report)(self.env.process, Report::Exported);
    }
    async fn report_missing(&self, object: &str) {
        if self.is_current().await {
            let text = format!("node {}: {object} is missing although it is held", self.id);
            self.env.world.violation(Kind::MissingHeld, text);
        }
    }
}
