# Stand-ins for the images that compose.yaml takes from a registry, on a Debian that debootstrap made.
FROM baton-debootstrap AS python
RUN for name in python python3; do ln -s /usr/bin/python3 /usr/local/bin/$name; done \
    && ln -s /usr/bin/pip3 /usr/local/bin/pip \
    && rm /usr/lib/python3*/EXTERNALLY-MANAGED
COPY pip.conf /etc/pip.conf
COPY wheels /usr/share/wheels
COPY ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
CMD ["python3"]

FROM baton-debootstrap AS nats
RUN ln -s /bin/busybox /usr/local/bin/wget
COPY nats-server /usr/local/bin/
ENV PATH=/usr/local/bin:/usr/bin:/bin
ENTRYPOINT ["nats-server"]

FROM baton-debootstrap AS prometheus
COPY prometheus /bin/
RUN mkdir /prometheus && chown nobody /prometheus
USER nobody
ENTRYPOINT ["/bin/prometheus"]
