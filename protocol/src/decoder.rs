//! What every decoder of bytes from a peer or a file is held to: by the property tests of its crate,
//! and by the fuzz targets in `fuzz/`.

use std::path::Path;

use crate::wire;

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
        (self.check)(&Self::changed(examples.swap_remove(which), changes));
    }

    /// Bytes after these changes.
    #[must_use]
    pub fn changed(mut bytes: Vec<u8>, changes: &[Change]) -> Vec<u8> {
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
        bytes
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

/// What is read as a message is written in no more bytes, and read as the same again. A value has one form
/// that is written and may have several that are read.
///
/// # Panics
/// When it is not.
pub fn reads_back<T: bincode::Decode<()> + wire::Encode>(bytes: &[u8]) {
    let write = |value: &T| wire::encode(value).expect("what was read has a size that can be sent");
    reads_back_by(bytes, |bytes| wire::decode::<T>(bytes).ok(), write);
}

/// The same of what is read and written in another way.
///
/// # Panics
/// When it is not.
pub fn reads_back_by<T>(
    bytes: &[u8],
    read: impl Fn(&[u8]) -> Option<T>,
    write: impl Fn(&T) -> Vec<u8>,
) {
    let Some(value) = read(bytes) else { return };
    let written = write(&value);
    assert!(written.len() <= bytes.len(), "the shortest form is the one that is written");
    let again = read(&written).expect("what was written can be read");
    assert_eq!(write(&again), written, "it is read as it was written");
}

/// The property tests of some decoders, in a module of tests: noise and changed examples are read or
/// refused, and the examples are the seeds in the tree. Whoever uses it has `proptest`.
#[macro_export]
macro_rules! try_decoders {
    ($decoders:expr) => {
        #[test]
        fn the_seeds_are_what_is_written_today() {
            let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds");
            for decoder in $decoders {
                decoder.check_seeds(::std::path::Path::new(seeds));
            }
        }

        ::proptest::proptest! {
            #![proptest_config(::proptest::test_runner::Config::with_cases(10_000))]

            #[test]
            fn noise_is_read_or_refused(
                decoder in ::proptest::sample::select($decoders),
                noise in ::proptest::collection::vec(::proptest::arbitrary::any::<u8>(), 0..400),
            ) {
                (decoder.check)(&noise);
            }

            #[test]
            fn changed_bytes_are_read_or_refused(
                decoder in ::proptest::sample::select($decoders),
                which in ::proptest::arbitrary::any::<usize>(),
                changes in ::proptest::collection::vec(
                    ::proptest::arbitrary::any::<(u16, u8, u8)>(),
                    1..6,
                ),
            ) {
                let edit = |(place, kind, byte)| (place, $crate::decoder::Edit::of(kind, byte));
                let changes: Vec<_> = changes.into_iter().map(edit).collect();
                decoder.check_changed(which, &changes);
            }
        }
    };
}
