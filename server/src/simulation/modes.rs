//! The modes of a scene's volumes. A volume's name says its mode.

/// Returns whether one node at a time may have a volume.
pub fn is_single(volume: &str) -> bool {
    !volume.starts_with("shared")
}

/// Returns whether several consumers of a node may have a volume at the same time.
pub fn is_shared(volume: &str) -> bool {
    !is_single(volume) || volume.starts_with("team")
}

/// Returns the access mode in which a volume is used.
pub fn access_mode(volume: &str) -> &'static str {
    match (is_single(volume), is_shared(volume)) {
        (true, false) => "single-node-writer",
        (true, true) => "single-node-multi-writer",
        (false, _) => "multi-node-multi-writer",
    }
}
