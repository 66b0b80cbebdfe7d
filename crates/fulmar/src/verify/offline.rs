//! Verifies the data directory of a stopped node and its store, or a store alone.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, ensure};
use fulmar_engine::{KnownPartitions, Verified};
use fulmar_meta::{Catalog, CatalogReplica, Embedded, MetaError};
use fulmar_pages::PartitionId;
use fulmar_store::{PageStore, Store, StoreUrl};
use indicatif::ProgressBar;

use super::{Damage, Report};
use crate::output;
use crate::start::{
    DataDirectory, ExpectedBinding, METADATA_FILE, StoreToRead, open_store_for_reading, open_store_read_only,
};

/// Verifies a data directory and its store. Locks the directory, so that no node can start.
pub(super) async fn verify(data: &Path) -> anyhow::Result<Report> {
    let shown = data.display();
    ensure!(
        data.join(METADATA_FILE).is_file(),
        "{shown} is not a data directory: it does not contain {METADATA_FILE}"
    );
    let data = DataDirectory::lock(data)?;
    let mut report = Report::default();
    let known = match catalog(data.path()).await? {
        Ok(known) => Some(known),
        Err(error) => {
            let place = match &error {
                MetaError::Damaged { place, .. } => place.clone(),
                _ => data.path().join(METADATA_FILE).display().to_string(),
            };
            let problem = format!("{error}. {}", error.remedy());
            report.damage.push(Damage { place, byte: None, problem, tenants: String::new() });
            None
        }
    };
    let StoreToRead { store, location: store_location, binding } = open_store_for_reading(data.path())?;
    let place = |file: &str| match file.strip_prefix("store/") {
        Some(object) => format!("{store_location}/{object}"),
        None => data.path().join(file).display().to_string(),
    };
    let live = known.as_ref().map(|known| &known.epochs);
    let bar = output::progress("verifying", 0);
    let found =
        fulmar_engine::verify_directory(data.path(), store.clone(), live, progress_callback(&bar)).await?;
    bar.finish_and_clear();
    report.checked.insert("catalog", 1);
    report.add(found, known.as_ref(), place);
    if let Some(binding) = binding {
        report.add_marks(&binding, store, place).await?;
    }
    Ok(report)
}

/// Verifies a store.
pub(super) async fn verify_store(url: &StoreUrl) -> anyhow::Result<Report> {
    let store = open_store_read_only(url)?;
    let (owner, known) = catalog_in(store.clone()).await.unzip();
    let mut report = Report::default();
    let live = known.as_ref().map(|known| &known.epochs);
    let place = |file: &str| format!("{url}/{}", file.strip_prefix("store/").unwrap_or(file));
    let bar = output::progress("verifying", 0);
    let found = fulmar_engine::verify_store(store.clone(), live, progress_callback(&bar)).await?;
    bar.finish_and_clear();
    report.add(found, known.as_ref(), place);
    // The expected contents of `shutdown_id` are only in the data directory.
    report.add_marks(&ExpectedBinding { owner, shutdown_id: None }, store, place).await?;
    Ok(report)
}

fn progress_callback(bar: &ProgressBar) -> impl FnMut(u64, u64) {
    |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    }
}

impl Report {
    /// Adds the engine's results.
    fn add(&mut self, found: Verified, known: Option<&CatalogInfo>, place: impl Fn(&str) -> String) {
        let read = [
            ("manifests", found.manifests),
            ("segments", found.segments),
            ("pages", found.pages),
            ("other objects", found.others),
            ("log records", found.records),
        ];
        self.checked.extend(read);
        self.damage.extend(found.damage.into_iter().map(|damage| Damage {
            place: place(&damage.file),
            byte: damage.offset,
            tenants: names(known, &damage.partitions),
            problem: damage.problem,
        }));
    }
}

impl Report {
    /// Adds the problems of the objects that bind the store to its data directory.
    async fn add_marks(
        &mut self,
        binding: &ExpectedBinding,
        store: Arc<dyn Store>,
        place: impl Fn(&str) -> String,
    ) -> anyhow::Result<()> {
        let problems = binding.verify(store).await?;
        self.damage.extend(problems.into_iter().map(|(object, problem)| Damage {
            place: place(&format!("store/{object}")),
            byte: None,
            tenants: String::new(),
            problem,
        }));
        Ok(())
    }
}

/// The partitions in the catalog, and the names of their tenants.
struct CatalogInfo {
    epochs: KnownPartitions,
    names: HashMap<PartitionId, String>,
}

impl CatalogInfo {
    fn of(catalog: &Catalog) -> Self {
        CatalogInfo {
            epochs: catalog.partitions().iter().map(|partition| (partition.id, partition.epoch)).collect(),
            names: catalog.tenants().iter().map(|tenant| (tenant.partition, tenant.name.clone())).collect(),
        }
    }
}

/// Returns the names of the partitions' tenants, for the report.
fn names(known: Option<&CatalogInfo>, partitions: &[PartitionId]) -> String {
    let name = |id: &PartitionId| {
        let known = known.and_then(|known| known.names.get(id)).cloned();
        known.unwrap_or_else(|| format!("(partition {id})"))
    };
    partitions.iter().map(name).collect::<Vec<_>>().join(", ")
}

/// Returns the partitions in the catalog, or its damage. Reads a copy, because opening a catalog
/// writes to it.
async fn catalog(data: &Path) -> anyhow::Result<Result<CatalogInfo, MetaError>> {
    let directory = tempfile::tempdir().context("cannot create a temporary directory; set TMPDIR")?;
    let metadata = data.join(METADATA_FILE);
    let copy = directory.path().join(METADATA_FILE);
    let suffixed = |path: &Path| PathBuf::from(format!("{}-wal", path.display()));
    for (from, to) in [
        (metadata.clone(), copy.clone()),
        (suffixed(&metadata), suffixed(&copy)),
        (metadata.with_extension("head"), copy.with_extension("head")),
    ] {
        match std::fs::copy(&from, &to) {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && from != metadata => {}
            Err(error) => return Err(error).with_context(|| format!("cannot copy {}", from.display())),
        }
    }
    let opened = match Embedded::open_accepting(&copy, None) {
        Ok(store) => Catalog::open(Arc::new(store)).await,
        Err(error) => Err(error),
    };
    // Errors name the copies. Replace them by the original files.
    let original =
        |text: String| text.replace(&directory.path().display().to_string(), &data.display().to_string());
    Ok(match opened {
        Ok(catalog) => Ok(CatalogInfo::of(&catalog)),
        Err(MetaError::Damaged { place, cause, remedy }) => Err(MetaError::Damaged {
            place: original(place),
            cause: original(cause),
            remedy: original(remedy),
        }),
        Err(error) => Err(error),
    })
}

/// Returns the id of the store's owner, and the partitions in the newest catalog in the store.
/// Returns `None` if that catalog is unusable: the verification of all catalogs reports the damage,
/// and the report has partition ids instead of names.
async fn catalog_in(store: Arc<dyn Store>) -> Option<(u128, CatalogInfo)> {
    let followed = CatalogReplica::open(PageStore::open(store)).await.ok()?;
    let owner = followed.node();
    let catalog = Catalog::read_only(followed).await.ok()?;
    Some((owner, CatalogInfo::of(&catalog)))
}
