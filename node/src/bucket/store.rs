//! A client of one folder in an object store.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt as _;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::local::LocalFileSystem;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, ClientConfigKey, GetOptions, ObjectStore, ObjectStoreExt as _, PutMode,
    PutOptions, PutPayload, RetryConfig,
};
use shoal_protocol::ids::ContentHash;
use tokio::time::timeout;

use super::error::BucketError;
use super::settings;
use super::url::{BucketUrl, Scheme};

type Result<T> = std::result::Result<T, BucketError>;

/// The longest request: a part of a large file on a link of 70 kB/s.
const REQUEST: &str = "120 seconds";
const CONNECT: &str = "10 seconds";

/// The end of the wait for the first answer of a store, its own retries included.
const PROBE: Duration = Duration::from_secs(60);

/// The name of the object that proves that objects can be written.
const PROBE_OBJECT: &str = ".shoal-probe";

/// The key of a hash in an object's metadata. Azure allows no hyphens.
const HASH: &str = "blake3";

/// Most objects in one folder of an archive that are listed.
const MOST_OBJECTS: usize = 1 << 16;

/// Retries inside one request, for some seconds: a store that is busy says so. The callers try again after longer pauses.
fn retries() -> RetryConfig {
    RetryConfig { max_retries: 6, retry_timeout: Duration::from_secs(30), ..RetryConfig::default() }
}

/// A folder in an object store. Clones share the client.
#[derive(Clone)]
pub(crate) struct Bucket {
    /// The address, for messages.
    place: String,
    variables: &'static str,
    store: Arc<dyn ObjectStore>,
    /// `None` where no object has parts.
    parts: Option<Arc<dyn MultipartStore>>,
    prefix: Path,
}

/// The size of an object, and the hash in its metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Described {
    pub(super) size: u64,
    pub(super) hash: Option<ContentHash>,
}

impl Bucket {
    /// Makes a client with the settings of the environment. Nothing is sent.
    ///
    /// # Errors
    /// If the settings do not suffice.
    pub(crate) fn open(url: &BucketUrl) -> Result<Self> {
        let (place, variables) = (url.to_string(), url.scheme.credentials());
        settings::check(url.scheme, std::env::vars_os())
            .map_err(|reason| BucketError::Settings { place: place.clone(), reason, variables })?;
        let built = match url.scheme {
            Scheme::S3 => s3(&url.bucket),
            Scheme::Gs => gs(&url.bucket),
            Scheme::Az => az(&url.bucket),
        };
        let (store, parts) = built.map_err(|error| BucketError::Settings {
            place: place.clone(),
            reason: error.to_string(),
            variables,
        })?;
        Ok(Self { place, variables, store, parts: Some(parts), prefix: url.prefix.clone() })
    }

    /// A folder of this machine in place of a bucket. It is created if it is missing.
    ///
    /// # Errors
    /// If the folder cannot be created.
    pub(crate) fn in_folder(folder: &std::path::Path) -> Result<Self> {
        std::fs::create_dir_all(folder).map_err(BucketError::local(folder))?;
        let place = folder.display().to_string();
        let store = LocalFileSystem::new_with_prefix(folder).map_err(|error| {
            BucketError::Unreachable { place: place.clone(), reason: error.to_string() }
        })?;
        let prefix = Path::default();
        Ok(Self { place, variables: "", store: Arc::new(store), parts: None, prefix })
    }

    /// The address of an object, for messages.
    pub(crate) fn address(&self, name: &str) -> String {
        format!("{}/{name}", self.place)
    }

    /// The address of the folder.
    pub(crate) fn place(&self) -> &str {
        &self.place
    }

    /// The interface for large objects, where the store has one.
    pub(super) fn parts(&self) -> Option<&dyn MultipartStore> {
        self.parts.as_deref()
    }

    /// The path of an object.
    pub(super) fn path(&self, name: &str) -> Result<Path> {
        let joined = match self.prefix.as_ref() {
            "" => name.to_owned(),
            prefix => format!("{prefix}/{name}"),
        };
        Path::parse(joined).map_err(|error| BucketError::Damaged {
            object: self.address(name),
            reason: error.to_string(),
        })
    }

    pub(super) fn failed(&self, name: &str) -> impl Fn(object_store::Error) -> BucketError {
        move |error| BucketError::of(&self.place, self.variables, name, &error)
    }

    /// Checks that objects can be written, read and listed.
    ///
    /// # Errors
    /// If the bucket does not exist, refuses a request, or does not answer.
    pub(crate) async fn probe(&self) -> Result<()> {
        let probe = async {
            self.write(PROBE_OBJECT, Bytes::from_static(b"shoal\n"), None).await?;
            self.read(PROBE_OBJECT, 64).await?;
            self.list("checkpoint").await?;
            // Where nothing may be deleted, the object stays, and the next probe replaces it.
            if let Err(error) = self.remove(PROBE_OBJECT).await {
                tracing::debug!(%error, "the probe is not removed");
            }
            Ok::<_, BucketError>(())
        };
        let seconds = PROBE.as_secs();
        let silent = |_| BucketError::Silent { place: self.place.clone(), seconds };
        timeout(PROBE, probe).await.map_err(silent)?
    }

    /// Writes an object in one request; readers see all of it or nothing.
    pub(super) async fn write(
        &self,
        name: &str,
        bytes: Bytes,
        hash: Option<ContentHash>,
    ) -> Result<()> {
        let options = PutOptions { attributes: attributes(hash), ..PutOptions::default() };
        let put = self.store.put_opts(&self.path(name)?, PutPayload::from(bytes), options).await;
        put.map(drop).map_err(self.failed(name))
    }

    /// Writes an object that must not be there yet. Returns whether it was not.
    pub(super) async fn create(&self, name: &str, bytes: Bytes) -> Result<bool> {
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let payload = PutPayload::from(bytes);
        match self.store.put_opts(&self.path(name)?, payload, options).await {
            Ok(_) => Ok(true),
            Err(
                object_store::Error::AlreadyExists { .. }
                | object_store::Error::Precondition { .. },
            ) => Ok(false),
            Err(error) => Err(self.failed(name)(error)),
        }
    }

    /// Reads a small object; `None` if it is not there.
    pub(super) async fn read(&self, name: &str, cap: u64) -> Result<Option<Bytes>> {
        let got = match self.store.get(&self.path(name)?).await {
            Ok(got) => got,
            Err(error) => {
                return match self.failed(name)(error) {
                    BucketError::Lacks { .. } => Ok(None),
                    error => Err(error),
                };
            }
        };
        if got.meta.size > cap {
            let reason = format!("it has {} bytes", got.meta.size);
            return Err(BucketError::Damaged { object: self.address(name), reason });
        }
        got.bytes().await.map(Some).map_err(self.failed(name))
    }

    /// Reads a range of an object.
    pub(super) async fn piece(&self, name: &str, range: Range<u64>) -> Result<Bytes> {
        self.store.get_range(&self.path(name)?, range).await.map_err(self.failed(name))
    }

    /// Describes an object; `None` if it is not there.
    pub(super) async fn describe(&self, name: &str) -> Result<Option<Described>> {
        let options = GetOptions { head: true, ..GetOptions::default() };
        match self.store.get_opts(&self.path(name)?, options).await {
            Ok(got) => {
                let key = Attribute::Metadata(HASH.into());
                let hash = got.attributes.get(&key).and_then(|text| text.parse().ok());
                Ok(Some(Described { size: got.meta.size, hash }))
            }
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed(name)(error)),
        }
    }

    /// Lists the objects of a folder with their sizes, by their names in it.
    pub(super) async fn list(&self, folder: &str) -> Result<BTreeMap<String, u64>> {
        let mut found = BTreeMap::new();
        let mut objects = self.store.list(Some(&self.path(folder)?));
        while let Some(object) = objects.try_next().await.map_err(self.failed(folder))? {
            if let Some(name) = object.location.filename()
                && found.len() < MOST_OBJECTS
            {
                found.insert(name.to_owned(), object.size);
            }
        }
        Ok(found)
    }

    /// Lists the folders in a folder, by their names.
    pub(super) async fn folders(&self, folder: &str) -> Result<Vec<String>> {
        let path = self.path(folder)?;
        match self.store.list_with_delimiter(Some(&path)).await {
            Ok(listed) => {
                let name = |path: &Path| path.filename().map(str::to_owned);
                Ok(listed.common_prefixes.iter().filter_map(name).take(MOST_OBJECTS).collect())
            }
            Err(object_store::Error::NotFound { .. }) => Ok(Vec::new()),
            Err(error) => Err(self.failed(folder)(error)),
        }
    }

    /// Removes an object, which may be gone already.
    pub(super) async fn remove(&self, name: &str) -> Result<()> {
        match self.store.delete(&self.path(name)?).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed(name)(error)),
        }
    }
}

impl fmt::Debug for Bucket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Bucket").field(&self.place).finish()
    }
}

/// The metadata of an object with this hash.
pub(super) fn attributes(hash: Option<ContentHash>) -> Attributes {
    let entry = |hash: ContentHash| (Attribute::Metadata(HASH.into()), hash.to_string());
    hash.map(entry).into_iter().collect()
}

type Client = (Arc<dyn ObjectStore>, Arc<dyn MultipartStore>);

/// Whether an endpoint is to be reached without TLS.
fn is_plain(endpoint: Option<String>) -> bool {
    endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"))
}

fn s3(bucket: &str) -> object_store::Result<Client> {
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        .with_retry(retries())
        .with_config(AmazonS3ConfigKey::Client(ClientConfigKey::Timeout), REQUEST)
        .with_config(AmazonS3ConfigKey::Client(ClientConfigKey::ConnectTimeout), CONNECT);
    if is_plain(builder.get_config_value(&AmazonS3ConfigKey::Endpoint)) {
        builder = builder.with_allow_http(true);
    }
    let store = Arc::new(builder.build()?);
    Ok((store.clone(), store))
}

fn gs(bucket: &str) -> object_store::Result<Client> {
    let mut builder = GoogleCloudStorageBuilder::from_env()
        .with_bucket_name(bucket)
        .with_retry(retries())
        .with_config(GoogleConfigKey::Client(ClientConfigKey::Timeout), REQUEST)
        .with_config(GoogleConfigKey::Client(ClientConfigKey::ConnectTimeout), CONNECT);
    if is_plain(builder.get_config_value(&GoogleConfigKey::BaseUrl)) {
        builder = builder.with_config(GoogleConfigKey::Client(ClientConfigKey::AllowHttp), "true");
    }
    let store = Arc::new(builder.build()?);
    Ok((store.clone(), store))
}

fn az(container: &str) -> object_store::Result<Client> {
    let mut builder = MicrosoftAzureBuilder::from_env()
        .with_container_name(container)
        .with_retry(retries())
        .with_config(AzureConfigKey::Client(ClientConfigKey::Timeout), REQUEST)
        .with_config(AzureConfigKey::Client(ClientConfigKey::ConnectTimeout), CONNECT);
    if is_plain(builder.get_config_value(&AzureConfigKey::Endpoint)) {
        builder = builder.with_allow_http(true);
    }
    let store = Arc::new(builder.build()?);
    Ok((store.clone(), store))
}
