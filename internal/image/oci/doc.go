// Package oci reads container images: their manifests, configuration and layers, from a registry, from a directory in
// the OCI image layout, from an archive of `docker save` and from a plain tar file. What comes over the network is kept
// in a cache by its digest and verified whenever it is used. It knows nothing of what the layers hold. Only package image
// may import it.
package oci
