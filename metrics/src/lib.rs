//! One typed handle for each metric of a Shoal peer.
