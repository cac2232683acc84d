//! The frames around the messages of an event file, which are those of TFRecord files: the length
//! and its checksum, the bytes and their checksum, all in little-endian order.

use crc::{CRC_32_ISCSI, Crc};

/// CRC-32C.
const CHECKSUM: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);

/// Added to a rotated checksum: the checksum of bytes that end in their own checksum is no constant
/// then.
const MASK: u32 = 0xa282_ead8;

/// Bytes before the message of a record.
const HEAD: usize = size_of::<u64>() + size_of::<u32>();

/// Returns a record with these bytes.
pub(super) fn record(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(HEAD + bytes.len() + size_of::<u32>());
    record.extend(length);
    record.extend(checksum(&length).to_le_bytes());
    record.extend(bytes);
    record.extend(checksum(bytes).to_le_bytes());
    record
}

fn checksum(bytes: &[u8]) -> u32 {
    CHECKSUM.checksum(bytes).rotate_right(15).wrapping_add(MASK)
}
