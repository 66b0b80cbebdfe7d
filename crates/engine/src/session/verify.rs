//! Verification of stored data by a session.

use fulmar_maintenance::Verified;
use fulmar_sqlite::Result;

use super::Session;

impl Session {
    /// Verifies the data that this node keeps in the store for its partitions. Can be cancelled
    /// like a statement.
    pub async fn verify(&mut self) -> Result<Verified> {
        let _running = self.start();
        let (engine, flag) = (self.engine.clone(), self.flag.clone());
        let check = move || if flag.is_set() { Err(flag.error()) } else { Ok(()) };
        engine.maintenance().verify(check).await
    }

    /// Runs work that is not the session's. A cancel ends it with an error, as if it were a statement.
    pub async fn run_cancellable<T>(&mut self, work: impl Future<Output = T>) -> Result<T> {
        let _running = self.start();
        self.cancellable(work).await
    }
}
