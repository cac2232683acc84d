//! Whole swarms on several machines: network namespaces, homes behind routers.

mod nat;
mod netns;
