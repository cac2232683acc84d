//! The requirements on every decoder of bytes from a peer or a file. The property tests of its
//! crate and the fuzz targets in `fuzz/` check them.

use std::path::Path;

use crate::wire;

/// A decoder and its checks.
#[derive(Debug, Clone, Copy)]
pub struct Decoder {
    /// The name of its fuzz target.
    pub name: &'static str,
    /// Small examples of bytes that the encoders write.
    pub examples: fn() -> Vec<Vec<u8>>,
    /// Decodes the bytes and checks the result.
    ///
    /// # Panics
    /// If the decoded value does not encode to what was decoded, which is a defect.
    pub check: fn(&[u8]),
}

/// One edit of a byte string, at a position in it.
pub type Change = (u16, Edit);

/// An edit at a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Edit {
    /// Replaces the byte.
    Replace(u8),
    /// Inserts a byte.
    Insert(u8),
    /// Removes all bytes from the position on.
    Cut,
}

impl Edit {
    /// Maps two random bytes to an edit.
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
    /// Checks one of the examples after these changes.
    ///
    /// # Panics
    /// Like [`Decoder::check`].
    pub fn check_changed(&self, which: usize, changes: &[Change]) {
        let mut examples = (self.examples)();
        let which = which % examples.len();
        (self.check)(&Self::changed(examples.swap_remove(which), changes));
    }

    /// Applies these changes to a byte string.
    #[must_use]
    pub fn changed(mut bytes: Vec<u8>, changes: &[Change]) -> Vec<u8> {
        for (place, edit) in changes {
            let place = usize::from(*place) % (bytes.len() + 1);
            match edit {
                Edit::Cut => bytes.truncate(place),
                Edit::Insert(byte) => bytes.insert(place, *byte),
                Edit::Replace(byte) => {
                    if let Some(target) = bytes.get_mut(place) {
                        *target = *byte;
                    }
                }
            }
        }
        bytes
    }

    /// Checks that the seeds of the fuzz target equal the examples. With `SHOAL_WRITE_SEEDS` in the
    /// environment, writes the seeds first.
    ///
    /// # Panics
    /// If they differ.
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

/// Checks that a decoded message encodes to at most as many bytes, and that these decode to the
/// same message. A value has one encoded form, but several byte strings may decode to it.
///
/// # Panics
/// If not.
pub fn reads_back<T: bincode::Decode<()> + wire::Encode>(bytes: &[u8]) {
    let write = |value: &T| wire::encode(value).expect("what was read has a size that can be sent");
    reads_back_by(bytes, |bytes| wire::decode::<T>(bytes).ok(), write);
}

/// Like [`reads_back`], with a given decoder and encoder.
///
/// # Panics
/// If not.
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

/// Generates the property tests of some decoders in a test module. Random bytes and changed
/// examples must decode or be rejected, and the examples must equal the seeds in the repository.
/// The calling crate needs `proptest`.
#[macro_export]
macro_rules! try_decoders {
    ($decoders:expr) => {
        #[test]
        fn the_seeds_equal_the_examples() {
            let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds");
            for decoder in $decoders {
                decoder.check_seeds(::std::path::Path::new(seeds));
            }
        }

        ::proptest::proptest! {
            #![proptest_config(::proptest::test_runner::Config::with_cases(10_000))]

            #[test]
            fn random_bytes_decode_or_are_rejected(
                decoder in ::proptest::sample::select($decoders),
                noise in ::proptest::collection::vec(::proptest::arbitrary::any::<u8>(), 0..400),
            ) {
                (decoder.check)(&noise);
            }

            #[test]
            fn changed_bytes_decode_or_are_rejected(
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
