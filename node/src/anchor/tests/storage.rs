//! The library's test suite for storage.

use openraft::testing::{StoreBuilder, Suite};
use shoal_formats::anchor::types::{StorageError, Types};

use super::super::disk::Disk;
use super::super::log::Log;
use super::super::state_machine::StateMachine;
use super::super::store::Store;
use super::*;

struct Folders;

struct Guard {
    _folder: TempDir,
    disk: Disk,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.disk.stop();
    }
}

impl StoreBuilder<Types, Log, StateMachine, Guard> for Folders {
    async fn build(&self) -> Result<(Guard, Log, StateMachine), StorageError> {
        let folder = tempfile::tempdir().expect("a folder");
        let Store { log, machine, disk } =
            Store::open(folder.path(), peer(0), Step(0), &BTreeSet::new()).expect("opened");
        Ok((Guard { _folder: folder, disk }, log, machine))
    }
}

#[test]
fn the_storage_passes_the_librarys_suite() {
    Suite::test_all(Folders).expect("the storage passes the suite");
}
