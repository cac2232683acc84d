#![no_main]

shoal_fuzz::target!("blob_piece");
