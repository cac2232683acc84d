//! What every decoder of bytes from a peer or a file is held to: by the property tests of its crate,
//! and by the fuzz targets in `fuzz/`.

use std::path::Path;

/// A decoder and how it is tried.
#[derive(Debug, Clone, Copy)]
pub struct Decoder {
    /// Name of its fuzz target.
    pub name: &'static str,
    /// Small examples of what our own encoders write.
    pub examples: fn() -> Vec<Vec<u8>>,
    /// Has the bytes read.
    ///
    /// # Panics
    /// When what was read is not written as it was read: that is a defect.
    pub check: fn(&[u8]),
}

/// One change of bytes, at a place within them.
pub type Change = (u16, Edit);

/// What is done at the place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Edit {
    /// Puts another byte there.
    Replace(u8),
    /// Puts one more byte there.
    Insert(u8),
    /// Takes away all from there on.
    Cut,
}

impl Edit {
    /// One of so many kinds, with a byte.
    #[must_use]
    pub fn of(kind: u8, byte: u8) -> Self {
        match kind % 8 {
            0 => Self::Cut,
            1 | 2 => Self::Insert(byte),
            _ => Self::Replace(byte),
        }
    }
}

impl Decoder {
    /// Tries one of the examples after these changes.
    ///
    /// # Panics
    /// As [`Decoder::check`].
    pub fn check_changed(&self, which: usize, changes: &[Change]) {
        let mut examples = (self.examples)();
        let which = which % examples.len();
        let mut bytes = examples.swap_remove(which);
        for (place, edit) in changes {
            let place = usize::from(*place) % (bytes.len() + 1);
            match edit {
                Edit::Cut => bytes.truncate(place),
                Edit::Insert(byte) => bytes.insert(place, *byte),
                Edit::Replace(byte) => {
                    if let Some(there) = bytes.get_mut(place) {
                        *there = *byte;
                    }
                }
            }
        }
        (self.check)(&bytes);
    }

    /// Checks that the seeds of the fuzz target are the examples; with `SHOAL_WRITE_SEEDS` in the
    /// environment they become so.
    ///
    /// # Panics
    /// When they are not.
    pub fn check_seeds(&self, seeds: &Path) {
        let folder = seeds.join(self.name);
        let writes = std::env::var_os("SHOAL_WRITE_SEEDS").is_some();
        if writes {
            std::fs::create_dir_all(&folder).expect("a folder for seeds");
        }
        for (number, example) in (self.examples)().into_iter().enumerate() {
            (self.check)(&example);
            let path = folder.join(number.to_string());
            if writes {
                std::fs::write(&path, &example).expect("a seed is written");
            }
            let same = std::fs::read(&path).is_ok_and(|seed| seed == example);
            let path = path.display();
            assert!(same, "{path} is old: run this test with SHOAL_WRITE_SEEDS=1 to write it");
        }
    }
}
