//! The client against a server that plays the Hub, with scripted faults.

mod downloads;
mod faults;
mod locks;
mod mirrors;
mod proxy;
mod pushes;
mod python;
mod repository;
mod server;
mod tls;
